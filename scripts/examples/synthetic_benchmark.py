"""How many random images per second a small model trains on, per rank and in all.

    mpirun -np 4 python synthetic_benchmark.py --model vgg

mlp and vgg are bound by communication (10 and 19 million parameters), cnn by computation.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import hiercomm.torch as hvd

CLASSES = 10
SIZE = 32  # pixels, of three colours each


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * SIZE * SIZE, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, CLASSES),
    )


def convolutions(*widths: int) -> list[nn.Module]:
    """Each a 3 x 3 convolution that halves the image."""
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return [*layers, nn.Flatten()]


def cnn() -> nn.Module:
    return nn.Sequential(*convolutions(32, 64, 128), nn.Linear(128 * (SIZE // 8) ** 2, CLASSES))


def vgg() -> nn.Module:
    """VGG's shape: convolutions that compute, then a head that holds nearly all parameters."""
    return nn.Sequential(
        *convolutions(32, 64, 128, 128),
        nn.Linear(128 * (SIZE // 16) ** 2, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, CLASSES),
    )


MODELS = {"mlp": mlp, "cnn": cnn, "vgg": vgg}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="cnn")
    add("--batch-size", type=int, default=32, help="images per rank and step")
    add("--num-warmup-batches", type=int, default=10, help="steps before the clock starts")
    add("--num-batches-per-iter", type=int, default=10, help="steps per figure")
    add("--num-iters", type=int, default=10, help="figures that are averaged")
    add("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    add("--threads", type=int, default=1, help="CPU threads per rank")
    add("--no-cuda", action="store_true")
    return parser.parse_args()


def say(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(args.threads)
    device = torch.device("cpu" if args.no_cuda or not torch.cuda.is_available() else "cuda")
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    model = MODELS[args.model]().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, SIZE, SIZE, device=device)
    labels = torch.randint(CLASSES, (args.batch_size,), device=device)

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    millions = sum(p.numel() for p in model.parameters()) / 1e6
    say(f"{args.model}: {millions:.1f} million parameters, batch size {args.batch_size}, {hvd.size()} x {device.type}")
    seconds(args.num_warmup_batches)
    rates = []
    for iteration in range(1, args.num_iters + 1):
        rates.append(args.batch_size * args.num_batches_per_iter / seconds(args.num_batches_per_iter))
        say(f"iter {iteration:3}  {rates[-1]:10.1f} img/sec per rank")

    averaged = hvd.allreduce(torch.tensor(rates), name="img_per_sec")  # over ranks; they march in step anyway
    mean, spread = float(averaged.mean()), 1.96 * float(averaged.std(correction=0))
    say(f"\nimg/sec per rank        {mean:10.1f} +-{spread:.1f}")
    say(f"img/sec on {hvd.size():3} rank(s)  {mean * hvd.size():10.1f} +-{spread * hvd.size():.1f}")


if __name__ == "__main__":
    main()
