"""LeNet-5 on handwritten digits or Fashion-MNIST, data-parallel.

    mpirun -np 4 python mnist.py                                             # digits: seconds, 98 %
    mpirun -np 4 python mnist.py --data fashion --batch-size 64 --epochs 4   # Fashion-MNIST: 88 %
    python mnist.py                                                          # one rank

Any folder with MNIST's own four files will do for --data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import data
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import hiercomm.torch as hvd

try:
    from tqdm import tqdm
except ImportError:  # then without a progress bar

    def tqdm(batches: Iterable[Any], **_: Any) -> Iterable[Any]:
        return batches


LEARNING_RATES = {"sgd": 0.01, "nesterov": 0.01, "adam": 0.001, "adamw": 0.001}


class LeNet(nn.Module):
    """LeNet-5 with rectifiers; images under 16 pixels get a smaller second kernel."""

    def __init__(self, images: data.Images) -> None:
        super().__init__()
        second = nn.Conv2d(6, 16, 5) if images.size >= 16 else nn.Conv2d(6, 16, 3, padding=1)
        self.features = nn.Sequential(
            nn.Conv2d(images.channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)
        )
        flat = self.features(torch.zeros(1, images.channels, images.size, images.size)).numel()
        self.classifier = nn.Sequential(
            nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, images.classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="digits", help=data.CHOICES)
    add("--epochs", type=int, default=20)
    add("--steps", type=int, default=0, help="stop after that many optimizer steps (0: after --epochs)")
    add("--batch-size", type=int, default=16, help="images per rank and backward pass")
    add("--optimizer", choices=sorted(LEARNING_RATES), default="sgd")
    add("--lr", type=float, help="learning rate of one rank (default: SGD 0.01, Adam 0.001)")
    add("--momentum", type=float, default=0.9)
    add("--no-scale-lr", action="store_true", help="do not multiply the learning rate by the number of ranks")
    add("--backward-passes", type=int, default=1, help="backward passes per optimizer step")
    add("--clip", type=float, default=0.0, help="largest norm of the averaged gradient (0: any)")
    add("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before the sum, by size/it after")
    add("--seed", type=int, default=42)
    add("--save", metavar="FILE", help="write the trained model's state_dict there")
    add("--no-cuda", action="store_true")
    return parser.parse_args()


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    lr = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    if not args.no_scale_lr:
        lr *= hvd.size()
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum, nesterov=args.optimizer == "nesterov")


class Trainer:
    """One rank's share of the training: its batches, and the optimizer that averages gradients over all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cpu" if args.no_cuda or not torch.cuda.is_available() else "cuda")
        if self.device.type == "cuda":
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

        images = data.load(args.data)
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            images.train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
        )
        self.train_batches = data.batches(images.train, self.sampler, args.batch_size)
        mine = torch.utils.data.SubsetRandomSampler(range(hvd.rank(), len(images.test), hvd.size()))
        self.test_batches = data.batches(images.test, mine, batch_size=500)

        self.model = LeNet(images).to(self.device)
        optimizer = make_optimizer(self.model, args)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=args.backward_passes,
            op=hvd.Average,
            gradient_predivide_factor=args.gradient_predivide_factor,
        )
        self.passes = self.steps = self.samples = 0
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        return bool(0 < self.args.steps <= self.steps)

    def train(self, epoch: int) -> float:
        """One epoch; returns the mean loss over all ranks."""
        self.model.train()
        self.sampler.set_epoch(epoch)
        losses: list[Tensor] = []
        begin = time.perf_counter()
        label = f"epoch {epoch + 1}/{self.args.epochs}"
        for images, labels in tqdm(self.train_batches, desc=label, disable=hvd.rank() != 0, leave=False):
            loss = F.cross_entropy(self.model(images.to(self.device)), labels.to(self.device))
            (loss / self.args.backward_passes).backward()
            losses.append(loss.detach())
            self.samples += len(labels) * hvd.size()
            self.passes += 1
            if self.passes % self.args.backward_passes == 0:
                self.step()
            if self.finished:
                break
        mean = float(torch.stack(losses).mean())
        self.seconds += time.perf_counter() - begin
        return float(hvd.allreduce(torch.tensor(mean), name="train_loss"))

    def step(self) -> None:
        """One update with the averaged gradients, clipped if asked for."""
        if self.args.clip > 0:
            self.optimizer.synchronize()  # so that the average is clipped, not each rank's own gradient
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Mean loss and accuracy over the whole test set, of which each rank takes its own part."""
        self.model.eval()
        totals = torch.zeros(3)  # loss, right answers, images
        for images, labels in self.test_batches:
            output, labels = self.model(images.to(self.device)), labels.to(self.device)
            loss = F.cross_entropy(output, labels, reduction="sum")
            totals += torch.tensor([float(loss), float((output.argmax(1) == labels).sum()), len(labels)])
        loss, right, count = hvd.allreduce(totals, name="test_totals").tolist()
        return loss / count, right / count


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # several ranks share this machine's cores

    trainer = Trainer(args)
    epochs, accuracy = 0, 0.0
    for epoch in range(args.epochs):
        train_loss = trainer.train(epoch)
        test_loss, accuracy = trainer.test()
        epochs += 1
        if hvd.rank() == 0:
            losses = f"train loss {train_loss:.4f}  test loss {test_loss:.4f}"
            print(f"epoch {epochs:3}  {losses}  accuracy {accuracy:.2%}", flush=True)
        if trainer.finished:
            break

    if hvd.rank() == 0:
        if args.save:
            torch.save(trainer.model.state_dict(), args.save)
        print(f"\ntest accuracy {accuracy * 100:10.2f} %")
        print(f"samples/s     {trainer.samples / max(trainer.seconds, 1e-9):10.0f}")
        print(f"epochs        {epochs:10}")
        print(f"steps         {trainer.steps:10}")
        print(f"ranks         {hvd.size():10}")


if __name__ == "__main__":
    main()
