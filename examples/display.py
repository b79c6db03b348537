"""What a run shows while it trains."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A progress bar on a terminal, else a line every `print_every` steps; silent where `shown` is false."""

    def __init__(self, name: str, start: int, steps: int, print_every: int, shown: bool) -> None:
        self.console = Console(quiet=not shown)
        self.name, self.steps, self.print_every = name, steps, print_every
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("validation {task.fields[validation]}"),
            TextColumn("{task.fields[milliseconds]} ms/step"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
            expand=True,
        )
        self.task = self.bar.add_task(
            name, total=steps, completed=start, loss="...", validation="...", milliseconds="..."
        )

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """Print a text as it is, above the bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, loss: float, seconds: float) -> None:
        milliseconds = f"{1e3 * seconds:.0f}"
        self.bar.update(self.task, completed=step, loss=f"{loss:.3f}", milliseconds=milliseconds)
        if self.bar.disable and (step % self.print_every == 0 or step == self.steps):
            self.say(f"{self.name}  step {step}/{self.steps}  loss {loss:.3f}  {milliseconds} ms/step")

    def validation(self, step: int, loss: float) -> None:
        self.bar.update(self.task, validation=f"{loss:.3f}")
        if self.bar.disable:
            self.say(f"{self.name}  step {step}/{self.steps}  validation loss {loss:.4f}")
