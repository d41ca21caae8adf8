"""MLflow: `--tracker mlflow`."""

import os
import time

from callbacks.tracker import Tracker


class MlflowTracker(Tracker):
    """Sends records to MLflow.

    Its own environment variables say where: MLFLOW_TRACKING_URI (default: a SQLite file, mlflow.db,
    where the command is run), MLFLOW_EXPERIMENT_NAME (default "keras-recipes").
    """

    name = "mlflow"

    def open_run(self, run_id: str | None) -> str:
        """A new run of the experiment, or the one that was begun before."""
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "keras-recipes")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=self.run_dir.name)
        for option, value in self.options.items():
            self._client.log_param(run.info.run_id, option, value)
        return run.info.run_id

    def send(self, step: int, row: dict[str, float]) -> None:
        """The metrics of one step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in row.items()]
        self._client.log_batch(self.run_id, metrics=metrics, synchronous=True)

    def close_run(self, finished: bool) -> None:
        """Marks the run as finished, or as stopped until it resumes."""
        self._client.set_terminated(self.run_id, status="FINISHED" if finished else "KILLED")
