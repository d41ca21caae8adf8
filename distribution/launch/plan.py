"""What a launcher is to do, and the exit statuses that it shares with the recipes."""

import dataclasses
import pathlib
import re

WRONG_OPTIONS = 2  # exit status of a command that cannot work; trying again is no use
SAVED_AND_STOPPED = 75  # exit status of a recipe that was asked to stop, and saved

# What may lie in a folder before its first run has written options.json: locks, and logs that the
# launcher opens.
BEFORE_A_RUN = re.compile(
    r"\.lock|\.launch\.lock|(worker|ps)-\d+\.log|chief\.log|\.options\.json\.\d+"
)


def foreign(folder: pathlib.Path) -> str | None:
    """A line where a folder is there and holds something, but no run; otherwise None.

    Raises:
        OSError: it cannot be read.
    """
    if (folder / "options.json").exists():
        return None
    names = sorted(p.name for p in folder.iterdir() if not BEFORE_A_RUN.fullmatch(p.name))
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"--run-dir {folder}: holds no run, but {', '.join(names[:3])}{more}; "
        "name a new or an empty folder"
    )


@dataclasses.dataclass
class LaunchPlan:
    """What the command line asks for, checked."""

    command: list[str]  # of this launcher, to be given again in order to resume
    module: str
    arguments: list[str]  # of the module, always with --run-dir
    workers_per_host: int
    parameter_servers: int
    hosts: list[str]
    rank: int  # of this host
    base_port: int | None  # None: free ports are found
    max_restarts: int | None  # None: no limit
    start_timeout: int  # seconds
    log_dir: pathlib.Path
    gpus: list[str]  # visible on this host
    cores: list[int]  # to be shared out among the workers of this host; empty: not pinned
    run_dir: pathlib.Path = pathlib.Path()
    min_workers: int | None = None  # on one machine, while others fail; None: all or none
    min_hosts: int | None = None  # while others are away; None: all or none
    host_timeout: int = 30  # seconds to wait for those that are away, where the others are enough
    planned_workers: int | None = None  # those that batch and rate follow, where some may be away

    def tasks(self) -> list[tuple[str, int]]:
        """The tasks of this host as pairs of type and index."""
        first = self.rank * self.workers_per_host
        tasks = [("worker", first + i) for i in range(self.workers_per_host)]
        if self.parameter_servers and self.rank == 0:
            tasks = [("ps", i) for i in range(self.parameter_servers)] + tasks + [("chief", 0)]
        return tasks

    def names_of(self, ranks: list[int]) -> str:
        """Some of the hosts, for messages."""
        return ", ".join(f"host {rank} ({self.hosts[rank]})" for rank in ranks)

    def identity(self) -> dict:
        """What must be the same in the launchers of all hosts."""
        workers = [self.workers_per_host, self.min_hosts]
        return {"hosts": self.hosts, "workers": workers, "module": self.module}

    def log_of(self, task: str, index: int) -> pathlib.Path:
        """The log file of a task."""
        return self.log_dir / ("chief.log" if task == "chief" else f"{task}-{index}.log")
