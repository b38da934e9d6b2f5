"""ResNet-50, data-parallel: warm-up, gradient accumulation, mixed precision, checkpoints and resuming.

    mpirun -np 4 python resnet50.py --data synthetic --image-size 224     # the real one, for GPUs
    mpirun -np 2 python resnet50.py --width 8 --layers 1,1,1,1 --epochs 12 --warmup-epochs 2 --base-lr 0.1

The second takes half a minute on two CPU cores (digits, 97 %).
Started again, it goes on after the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
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


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        last, norm = convolution(width, out, 1)
        nn.init.zeros_(norm.weight)  # each block begins as the identity
        self.residual = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            last,
            norm,
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


def convolution(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


def resnet(images: data.Images, width: int, layers: list[int]) -> nn.Module:
    """The ResNet of He et al.; images under 64 pixels get a stem that does not shrink them."""
    if images.size < 64:
        stem: list[nn.Module] = [*convolution(images.channels, width, 3), nn.ReLU()]
    else:
        stem = [*convolution(images.channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    channels = width
    for stage, count in enumerate(layers):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(Bottleneck(channels, width << stage, stride))
            channels = (width << stage) * Bottleneck.expansion
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, images.classes))


class Metric:
    """A running mean over steps and ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.total, self.count = torch.tensor(0.0), 0

    def update(self, value: Tensor) -> None:
        self.total += hvd.allreduce(value.detach().float().cpu(), name=self.name)
        self.count += 1

    @property
    def mean(self) -> float:
        return float(self.total) / max(self.count, 1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="digits", help=f"synthetic, {data.CHOICES}")
    add("--image-size", type=int, default=32, help="of synthetic images, in pixels")
    add("--width", type=int, default=64, help="channels of the first stage")
    add("--layers", default="3,4,6,3", help="bottlenecks per stage")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=32, help="images per rank and backward pass")
    add("--batches-per-allreduce", type=int, default=1, help="backward passes per optimizer step")
    add("--base-lr", type=float, default=0.0125, help="learning rate of one rank and one backward pass")
    add("--warmup-epochs", type=float, default=5, help="over which the learning rate grows to that of all ranks")
    add("--momentum", type=float, default=0.9)
    add("--wd", type=float, default=5e-5, help="weight decay")
    add("--label-smoothing", type=float, default=0.0)
    add("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before the sum, by size/it after")
    add("--amp", action="store_true", help="mixed precision (float16 on GPUs, bfloat16 on CPUs)")
    add("--checkpoint-format", default="checkpoint-{epoch}.pth.tar", help="file name with {epoch}; empty: none")
    add("--seed", type=int, default=42)
    add("--threads", type=int, default=1, help="CPU threads per rank")
    add("--no-cuda", action="store_true")
    return parser.parse_args()


class Trainer:
    """One rank's share of the training, from the newest checkpoint on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cpu" if args.no_cuda or not torch.cuda.is_available() else "cuda")
        if self.device.type == "cuda":
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

        images = data.load(args.data, args.image_size)
        ranks = {"num_replicas": hvd.size(), "rank": hvd.rank(), "seed": args.seed}
        self.sampler: DistributedSampler[Any] = DistributedSampler(images.train, **ranks)
        step_size = args.batch_size * args.batches_per_allreduce
        self.train_batches = data.batches(images.train, self.sampler, step_size, drop_last=True)
        if data.length(self.train_batches) == 0:
            raise SystemExit(f"{len(images.train)} images: too few for {hvd.size()} ranks x {step_size} images a step")
        test_sampler: DistributedSampler[Any] = DistributedSampler(images.test, shuffle=False, **ranks)
        self.test_batches = data.batches(images.test, test_sampler, args.batch_size)

        self.model = resnet(images, args.width, [int(count) for count in args.layers.split(",")]).to(self.device)
        self.lr_scale = hvd.size() * args.batches_per_allreduce
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(
                self.model.parameters(),
                lr=args.base_lr * self.lr_scale,
                momentum=args.momentum,
                weight_decay=args.wd,
            ),
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=args.batches_per_allreduce,
            op=hvd.Average,
            gradient_predivide_factor=args.gradient_predivide_factor,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.amp)
        self.first_epoch = self.resume()

    def resume(self) -> int:
        """Rank 0 looks for the newest checkpoint and loads it; the others get it from rank 0."""
        epochs = range(self.args.epochs, 0, -1)
        newest = next((epoch for epoch in epochs if self.checkpoint(epoch).is_file()), 0)
        newest = int(hvd.broadcast(torch.tensor(newest), 0, name="resume_from_epoch").item())
        if newest > 0 and hvd.rank() == 0:
            state = torch.load(self.checkpoint(newest), map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            print(f"resumed from {self.checkpoint(newest)}")
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        return newest

    def checkpoint(self, epoch: int) -> Path:
        return Path(self.args.checkpoint_format.format(epoch=epoch))

    def save(self, epoch: int) -> None:
        if hvd.rank() != 0 or not self.args.checkpoint_format:
            return
        unfinished = self.checkpoint(epoch).with_suffix(".part")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, unfinished)
        os.replace(unfinished, self.checkpoint(epoch))  # so a job that is killed leaves no half a checkpoint

    def adjust_learning_rate(self, epoch: float) -> None:
        """Grow from one rank's rate to that of all, then fall tenfold at 1/3, 2/3 and 8/9 of the way."""
        if epoch < self.args.warmup_epochs:
            factor = 1 + (self.lr_scale - 1) * epoch / self.args.warmup_epochs
        else:
            passed = sum(epoch >= part * self.args.epochs for part in (1 / 3, 2 / 3, 8 / 9))
            factor = self.lr_scale * 0.1**passed
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.base_lr * factor

    def train(self, epoch: int) -> tuple[float, float]:
        """One epoch; returns loss and accuracy."""
        self.model.train()
        self.sampler.set_epoch(epoch)
        loss, accuracy = Metric("train_loss"), Metric("train_accuracy")
        label = f"epoch {epoch + 1}/{self.args.epochs}"
        progress = tqdm(self.train_batches, desc=label, disable=hvd.rank() != 0, leave=False)
        for index, (images, labels) in enumerate(progress):
            self.adjust_learning_rate(epoch + index / data.length(self.train_batches))
            self.optimizer.zero_grad()
            parts = list(zip(images.split(self.args.batch_size), labels.split(self.args.batch_size), strict=True))
            for part_images, part_labels in parts:
                part_loss, part_accuracy = self.evaluate(part_images, part_labels)
                self.scaler.scale(part_loss / len(parts)).backward()
                loss.update(part_loss)
                accuracy.update(part_accuracy)
            self.step()
        return loss.mean, accuracy.mean

    def step(self) -> None:
        if not self.args.amp:
            self.optimizer.step()
            return
        self.optimizer.synchronize()  # so that all ranks unscale, and judge, the same averaged gradients
        self.scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def evaluate(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of one batch."""
        images, labels = images.to(self.device), labels.to(self.device)
        with torch.autocast(self.device.type, enabled=self.args.amp):
            output = self.model(images)
            loss = F.cross_entropy(output, labels, label_smoothing=self.args.label_smoothing)
        return loss, (output.argmax(1) == labels).float().mean()

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Loss and accuracy on the test set."""
        self.model.eval()
        loss, accuracy = Metric("test_loss"), Metric("test_accuracy")
        for images, labels in self.test_batches:
            batch_loss, batch_accuracy = self.evaluate(images, labels)
            loss.update(batch_loss)
            accuracy.update(batch_accuracy)
        return loss.mean, accuracy.mean


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    trainer = Trainer(args)
    if hvd.rank() == 0:
        millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
        print(f"{millions:.1f} million parameters, {hvd.size()} rank(s), from epoch {trainer.first_epoch + 1}")
    for epoch in range(trainer.first_epoch, args.epochs):
        train_loss, train_accuracy = trainer.train(epoch)
        test_loss, test_accuracy = trainer.test()
        trainer.save(epoch + 1)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:3}  train loss {train_loss:.4f}  accuracy {train_accuracy:.2%}"
                f"  test loss {test_loss:.4f}  accuracy {test_accuracy:.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
