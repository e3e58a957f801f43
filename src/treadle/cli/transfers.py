"""View of a download: one bar over all files in a terminal, a line now and then in a log."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..models.transfer import ProgressLines, Transfer


class TransferView:
    """View of transfers on `console` until `close`, after which it may begin again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = ProgressLines(lambda line: console.print(f"  {line}", markup=False, soft_wrap=True))
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show(self, transfer: Transfer) -> None:
        """Show the state of a download."""
        if not self._console.is_terminal:
            self._lines(transfer)
            return
        if self._bar is None:
            self._begin(transfer)
        assert self._bar is not None
        total = max(1, transfer.total_bytes)  # an empty download is complete
        done = transfer.done_bytes if transfer.total_bytes else total
        self._bar.update(self._task, completed=done, total=total, details=transfer.details)

    def _begin(self, transfer: Transfer) -> None:
        self._bar = Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[details]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(transfer.model, details=transfer.details)
        self._bar.start()

    def close(self) -> None:
        """Leave the bar as it is and give the cursor back. Idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
