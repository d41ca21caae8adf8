"""Weights & Biases: `--tracker wandb`."""

import os

from callbacks.tracker import Tracker


class WandbTracker(Tracker):
    """Sends records to Weights & Biases.

    Its own environment variables say where: WANDB_MODE=offline writes into the run's folder, for
    `wandb sync`; WANDB_PROJECT (default "keras-recipes"), WANDB_ENTITY, WANDB_API_KEY.
    """

    name = "wandb"

    def open_run(self, run_id: str | None) -> str:
        """`wandb.init()`, with the number of the run where it was begun before."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "keras-recipes"),
            name=self.run_dir.name,
            id=run_id,
            resume="allow",
            dir=self.run_dir,
            config=self.options,
            allow_val_change=True,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        return self._run.id

    def send(self, step: int, row: dict[str, float]) -> None:
        """One row of the history."""
        self._run.log(row, step=step, commit=True)

    def close_run(self, finished: bool) -> None:
        """Ends the process that sends; a stopped run shows as failed until it resumes."""
        self._run.finish(exit_code=0 if finished else 1)
