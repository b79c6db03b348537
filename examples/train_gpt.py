"""Train a small GPT on text with either dmuon or AdamW, on any of several meshes.

    torchrun --nproc-per-node 4 examples/train_gpt.py --optimizer dmuon
    torchrun --nproc-per-node 4 examples/train_gpt.py --optimizer dmuon --mesh dp=2,tp=2
    python examples/train_gpt.py --optimizer adamw --steps 50

What dmuon needs is in `parallel.py`; the loop here is what any training script does.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends without a traceback

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import dmuon
from checkpoints import Checkpoints
from display import Display
from gpt import GPTConfig
from interrupt import Interrupt
from metrics import Metrics, plot_losses, read_metrics
from parallel import (
    MESH_HELP,
    build_mesh,
    build_model_and_optimizer,
    data_parallel_place,
    mesh_text,
    misfit,
    parse_mesh,
)
from placement import where_it_lives
from text_data import VOCAB_SIZE, TextData, unigram_entropy

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on text with dmuon or AdamW. "
        "Start it with torchrun, or as one process with plain python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    layout = parser.add_argument_group("where it runs")
    layout.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there"
    )
    layout.add_argument("--mesh", type=parse_mesh, metavar="SIZES", help=MESH_HELP)
    layout.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="compute dtype; weights and optimizer state are float32. auto: bfloat16 on cuda, float32 on cpu",
    )

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--optimizer", choices=("dmuon", "adamw"), default="dmuon", help="what updates the model"
    )
    optimizer.add_argument("--lr", type=float, default=0.02, help="learning rate of Muon's matrices")
    optimizer.add_argument(
        "--adamw-lr", type=float, default=4e-3, help="learning rate of everything that AdamW updates"
    )
    optimizer.add_argument("--weight-decay", type=float, default=0.0, help="of the projection matrices alone")
    optimizer.add_argument("--warmup", type=int, default=20, metavar="STEPS", help="steps of linear warmup")
    optimizer.add_argument(
        "--clip", type=float, default=1.0, metavar="NORM", help="largest global gradient norm"
    )

    model = parser.add_argument_group("model")
    model.add_argument("--width", type=positive_int, default=128)
    model.add_argument("--layers", type=positive_int, default=4)
    model.add_argument("--heads", type=positive_int, default=4)

    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="GLOB", help="text files; default: Python's standard library sources")
    data.add_argument("--seq-len", type=positive_int, default=128, help="bytes per sequence")
    data.add_argument("--batch-size", type=positive_int, default=16, help="sequences per step, all ranks")
    data.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=positive_int, default=400)
    run.add_argument("--val-every", type=positive_int, default=50, metavar="STEPS")
    run.add_argument("--val-batches", type=positive_int, default=8, help="batches of each validation")
    run.add_argument("--checkpoint-every", type=positive_int, default=100, metavar="STEPS")
    run.add_argument(
        "--print-every", type=positive_int, default=20, metavar="STEPS", help="without a terminal"
    )
    run.add_argument(
        "--out", type=Path, default=Path("runs/gpt"), help="metrics, picture and checkpoints go here"
    )
    start = run.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    start.add_argument("--overwrite", action="store_true", help="delete an earlier run under --out")
    return parser


def start_distributed(choice: str) -> torch.device:
    """Join the process group that torchrun describes, or make one of a single process; returns the device."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    local_rank, local_world_size = (
        int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    device = torch.device("cpu") if choice == "cpu" else torch.device("cuda", local_rank)
    if choice == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    backend = {"cpu": "gloo", "cuda": "nccl"}[choice]
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Linear warmup over the first `warmup` steps, then a half cosine down to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def next_token_loss(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Mean cross entropy in nats per token, over this rank's batch."""
    inputs, targets = (tensor.to(device) for tensor in batch)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: TextData, count: int, device: torch.device) -> float:
    """Mean loss over `count` validation batches."""
    model.eval()
    total = torch.zeros((), device=device)
    for index in range(count):
        total += next_token_loss(model, data.validation_batch(index, count), device)
    model.train()
    dist.all_reduce(total)
    return total.item() / (count * dist.get_world_size())  # a mean over equal parts, as in `agree`


def prepare_out(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    """Decide on rank 0, for all, where to start; returns the step. Raises SystemExit with what to do."""
    answer: list[int | str] = [0]
    if dist.get_rank() == 0:
        answer = [start_step(args, checkpoints)]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], str):
        refuse(answer[0])
    return int(answer[0])


def refuse(reason: str) -> None:
    """End every rank, the first one with the reason; nothing happens if that is empty."""
    if reason:
        raise SystemExit(reason if dist.get_rank() == 0 else 2)


def start_step(args: argparse.Namespace, checkpoints: Checkpoints) -> int | str:
    """The step to start at, or why the run cannot start. Writes or checks the run's configuration."""
    path = args.out / "config.json"
    config = {
        key: getattr(args, key)
        for key in ("optimizer", "width", "layers", "heads", "seq_len", "data", "seed")
    }
    if args.resume:
        steps = checkpoints.steps()
        if not steps:
            return f"--resume: there is no checkpoint under {checkpoints.folder}"
        earlier = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{key} was {earlier.get(key)!r}, is {config[key]!r}"
            for key in config
            if config[key] != earlier.get(key)
        ]
        return f"--resume: not the run under {args.out}: {'; '.join(changed)}" if changed else steps[-1]
    if path.exists() and not args.overwrite:
        return f"{args.out} holds an earlier run: give --resume, --overwrite or another --out"
    if path.exists():
        shutil.rmtree(checkpoints.folder, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return 0


def train_step(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    optimizer: Optimizer,
    scheduler: LambdaLR,
    clip: float,
    device: torch.device,
) -> tuple[torch.Tensor, dict[str, float]]:
    """One update; returns this rank's loss and what is worth recording."""
    loss = next_token_loss(model, batch, device)
    loss.backward()
    norm = float(dmuon.clip_grad_norm_(model, clip))  # over all meshes that the gradients lie on
    lr = float(scheduler.get_last_lr()[0])
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.detach(), {"lr": lr, "grad_norm": norm}


def agree(loss: torch.Tensor, stop: bool) -> tuple[float, bool]:
    """The mean loss over the ranks, and whether any of them wants to stop, in one tiny all-reduce.

    Each data-parallel rank counts once per rank of its TP group, so this is the mean over the batch.
    A signal reaches the ranks at different moments; this way all stop after the same step.
    """
    shared = torch.stack((loss, torch.full_like(loss, float(stop))))
    dist.all_reduce(shared)
    total, stops = shared.tolist()
    return total / dist.get_world_size(), stops > 0


def train(args: argparse.Namespace, device: torch.device) -> int:
    """The whole run; returns the exit status."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = args.mesh or {"dp": world_size}
    gpt = GPTConfig(VOCAB_SIZE, args.width, args.layers, args.heads, args.seq_len)
    refuse(misfit(sizes, world_size, args.batch_size, args.optimizer, gpt))
    mesh = build_mesh(sizes, device)
    checkpoints = Checkpoints(args.out / "checkpoints")
    start = prepare_out(args, checkpoints)
    model, optimizer = build_model_and_optimizer(args, gpt, mesh, device)
    display = Display(args.optimizer, start, args.steps, args.print_every, shown=rank == 0)
    display.say(f"{args.optimizer} on {mesh_text(sizes)}: {where_it_lives(model, args.optimizer)}")

    place, places = data_parallel_place(mesh)
    data = TextData(
        args.data,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        rank=place,
        ranks=places,
        seed=args.seed,
    )
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.warmup, args.steps))
    if start:
        checkpoints.load(start, model, optimizer, scheduler)

    if args.optimizer == "dmuon":
        display.say(str(dmuon.summary(model)))
    size = sum(param.numel() for param in model.parameters())
    tokens = args.batch_size * args.seq_len
    display.say(
        f"{args.optimizer}: {size:,} parameters, {world_size} processes on {device.type}, "
        f"{tokens:,} bytes a step of {len(data.train):,} bytes of training text"
    )
    metrics = Metrics(args.out / "metrics.jsonl", start, shown=rank == 0)

    def run_validation(step: int) -> None:
        loss = validate(model, data, args.val_batches, device)
        display.validation(step, loss)
        metrics.write(step=step, val_loss=loss)

    if start == 0:
        run_validation(0)
    interrupt = Interrupt()  # up to here a signal just ends the process: there is nothing to save yet
    with display, metrics:
        for step in range(start + 1, args.steps + 1):
            began = time.perf_counter()
            loss, record = train_step(model, data.train_batch(step), optimizer, scheduler, args.clip, device)
            mean_loss, stop = agree(loss, interrupt.requested())
            seconds = time.perf_counter() - began
            if not math.isfinite(mean_loss):
                raise SystemExit(f"the loss is {mean_loss} at step {step}: try a smaller learning rate")

            display.step(step, mean_loss, seconds)
            metrics.write(step=step, loss=mean_loss, seconds=seconds, **record)
            last = step == args.steps
            if last or stop or step % args.checkpoint_every == 0:
                checkpoints.save(step, model, optimizer, scheduler)
            if last or step % args.val_every == 0:
                run_validation(step)
            if stop and not last:
                display.say(f"stopped after step {step}; --resume goes on from there")
                return INTERRUPTED

    if rank == 0:
        picture = args.out / "loss.png"
        title = f"GPT of {size / 1e6:.1f} M parameters on {args.data or 'Python sources'}"
        rows = read_metrics(args.out / "metrics.jsonl")
        plot_losses(picture, {args.optimizer: rows}, title, unigram_entropy(data.validation))
        display.say(f"wrote {picture}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    device = start_distributed(args.device)
    try:
        status = train(args, device)
        # Nobody leaves while the first rank still draws. Meanwhile gloo's threads let go of the last
        # collective's tensors, which they could no longer do in a process that ends.
        dist.barrier()
        return status
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
