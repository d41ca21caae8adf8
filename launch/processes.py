"""Starts a recipe in several processes, on one machine or on a fixed list of hosts.

    python -m launch --nproc-per-node 2 -m recipes.bert_mlm --epochs 1

Each process gets a `TF_CONFIG`, a share of the GPUs (without GPUs: of the cores) and a log file.
The launcher never imports TensorFlow: it starts at once and uses no GPU memory.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import fcntl
import itertools
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

from distribution.cluster import LAUNCHED, RESTARTED, slurm_tasks
from distribution.errors import DistributionError
from training.errors import SAVED_AND_STOPPED
from training.folder_check import make_new_folder, missing_folders, not_a_run, remove_empty
from training.options import interpreter
from training.signals import HANDLED, SAME_REQUEST_SECONDS

WRONG_OPTIONS = 2  # exit status for wrong options; a restart does not help
DELIBERATE = (WRONG_OPTIONS, SAVED_AND_STOPPED)  # the other workers end the same way by themselves
DEFAULT_BASE_PORT = 22200
# Below Linux's range for outgoing connections (32768 and up): a free port from that range could be
# in use before TensorFlow listens.
FREE_PORTS = range(20000, 32000)
THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
OWN_OPTIONS = "--nproc-per-node --ps --hosts --node-rank --base-port --max-restarts".split()
# Options of torchrun, `accelerate launch` and mpirun, and what they are here.
HOSTS = "--hosts HOST0,HOST1,... with all hosts, the same list on each; leave it out on one machine"
FIRST_HOST = "the first of --hosts runs the chief; --base-port N is its port"
BY_HOSTS = "leave it out: hosts find one another by --hosts and --base-port"
GPUS = "leave it out: CUDA_VISIBLE_DEVICES chooses GPUs, -1 the CPU"
ELSEWHERE = {
    "--num-processes": "--nproc-per-node P, the workers on each host",
    "--num-gpus": "--nproc-per-node P, the workers on each host",
    "--np": "--nproc-per-node P, the workers on each host",
    "-np": "--nproc-per-node P, the workers on each host",
    "-n": "--nproc-per-node P, the workers on each host",
    "--nnodes": HOSTS,
    "--num-nodes": HOSTS,
    "--num-machines": HOSTS,
    "--hostfile": HOSTS,
    "--host": HOSTS,
    "-H": HOSTS,
    "--machine-rank": "--node-rank R, the position of this host in --hosts, from 0",
    "--master-addr": FIRST_HOST,
    "--master-port": FIRST_HOST,
    "--main-process-ip": FIRST_HOST,
    "--main-process-port": FIRST_HOST,
    **dict.fromkeys(
        ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--same-network"),
        BY_HOSTS,
    ),
    **dict.fromkeys(("--gpu-ids", "--multi-gpu", "--cpu"), GPUS),
    "--standalone": "leave it out: without --hosts the processes run on this machine",
    "--log-dir": "--run-dir DIR after -m MODULE: logs are in the run's folder",
    "--mixed-precision": "--precision mixed_bfloat16 or mixed_float16 after -m recipes.NAME",
    "--module": "-m MODULE",
}
POLL_SECONDS = 0.1
SAVE_SECONDS = 30  # for the others to end after one worker has ended deliberately
START_SECONDS = 300  # to wait for the other hosts
OUTPUT_SECONDS = 5  # for whoever reads the terminal or pipe, where output must not stop the run
UNCONNECTED_SECONDS = 5  # for processes that were asked to stop while they wait for another host
CPUS = Path("/sys/devices/system/cpu")

EXAMPLES = """\
one machine, two workers (with GPUs: half of them each):
  python -m launch --nproc-per-node 2 -m recipes.bert_mlm --epochs 1

one machine, two workers and a parameter server:
  python -m launch --nproc-per-node 2 --ps 1 -m recipes.bert_mlm

two machines: the same command on each, with its own --node-rank (here on the second)
  python -m launch --hosts 10.0.0.1,10.0.0.2 --node-rank 1 \\
      -m recipes.bert_mlm --run-dir /shared/runs/first

Ctrl-C, SIGTERM or SIGHUP (of a closed terminal) asks the processes to save and stop, a second one
kills them.
exit status: that of the first process that failed; 128 + n if signal n killed it; 75 if the run
stopped (the same command resumes it); 2 if the options are wrong.
Ports are neither encrypted nor protected by a password: private networks only.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    if not {"-h", "--help"}.isdisjoint(options.arguments):  # no run, so no folder
        return subprocess.call([sys.executable, "-m", options.module, *options.arguments])
    return Launch(options).run()


def say(text: str, speaker: str = "launch") -> None:
    """Prints a message of the launcher. A closed or stopped terminal must not stop a run."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], OUTPUT_SECONDS)[1]:  # standard error
            print(f"{speaker}: {text}", file=sys.stderr, flush=True)


def resuming(command: list[str]) -> str:
    """Returns the command line that resumes a run: without `--resume never`, which refuses it."""
    never = ("--resume", "never")
    pairs = zip(["", *command[:-1]], command, [*command[1:], ""], strict=True)
    return shlex.join(
        word
        for before, word, after in pairs
        if never not in ((before, word), (word, after)) and word != "=".join(never)
    )


def show(text: bytes, seconds: float = 0) -> bytes:
    """Writes to standard output what it takes within some seconds; returns the rest.

    A stopped terminal (Ctrl-S), a pager or a full pipe would make the launcher wait, and then it
    would pass no signal on.
    """
    try:
        while text and select.select([], [1], [], seconds)[1]:
            text = text[os.write(1, text[: select.PIPE_BUF]) :]
    except OSError:  # the terminal is closed; the log is complete
        return b""
    return text


# --- Options ---


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the launcher's options."""
    parser = argparse.ArgumentParser(
        prog="python -m launch",
        usage="python -m launch [options] -m MODULE [options of the module]",
        description="Start a recipe in several processes, on one machine or on several.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        metavar="P",
        type=whole_number(1, 1024),
        default=1,
        help="Workers on each host (default 1).",
    )
    add(
        "--ps",
        metavar="K",
        type=whole_number(0, 1024),
        default=0,
        help="Parameter servers, on one machine (default 0: workers train in step). They and the"
        " coordinator ('chief') are separate processes.",
    )
    add(
        "--hosts",
        metavar="HOST0,HOST1,...",
        type=lambda text: [host.strip() for host in text.split(",")],
        default=["localhost"],
        help="Names or IPv4 addresses of all hosts, with the same list and P on each; the first"
        " host runs the chief.",
    )
    add(
        "--node-rank",
        metavar="R",
        type=whole_number(0, 1023),
        help="Position of this host in --hosts, from 0.",
    )
    add(
        "--base-port",
        metavar="N",
        type=whole_number(1024, 60000),
        help="Worker i of a host listens at port N + i (default: free ports;"
        f" {DEFAULT_BASE_PORT} with --hosts).",
    )
    add(
        "--max-restarts",
        metavar="X",
        type=whole_number(0, 10**6),
        default=0,
        help="Restarts of all processes after one has died (default 0); none after exit status"
        " 2 or 75.",
    )
    add(
        "-m",
        metavar="MODULE",
        help="Module to run, like python's -m; it gets all arguments after it. Without a --run-dir"
        " among them, the launcher passes runs/MODULE/DATE-TIME.",
    )
    return parser


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers within bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {low} to {high}, found {text[:20]!r}"
            )
        return int(text)

    return parse


def read_options(argv: list[str]) -> argparse.Namespace:
    """Reads and checks the command line.

    Args:
        argv: Arguments, without the name of the program.

    Returns:
        The options, and derived from them: `module` (a name), `arguments`, `run_dir` (None without
        `--run-dir`), `gpus`, `cores` and `command`, which starts the run.

    Raises:
        SystemExit: With status 2, after a message that names the problem.
    """
    parser = make_parser()
    options, run_dir = split_options(parser, argv)
    options.gpus, workers = visible_gpus(), options.nproc_per_node
    problems = find_problems(options, run_dir)
    if problems:
        parser.exit(WRONG_OPTIONS, "".join(f"launch: {problem}\n" for problem in problems))
    options.command = [interpreter(), "-m", "launch", *argv]
    options.run_dir, options.node_rank = run_dir, options.node_rank or 0
    if len(options.hosts) > 1:
        options.base_port = options.base_port or DEFAULT_BASE_PORT
    # Only Linux can pin a process to cores.
    cores = own_cores() if hasattr(os, "sched_setaffinity") else []
    options.cores = cores if not options.gpus and 1 < workers <= len(cores) else []
    return options


def split_options(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, Path | None]:
    """Parses the options before `-m`; keeps the `module` and its `arguments`.

    Returns:
        The options, and the `--run-dir` among the arguments or None.
    """
    # Split by hand: argparse would remove a `--` from the module's arguments.
    split = argv.index("-m") if "-m" in argv else len(argv)
    options, unknown = parser.parse_known_args(argv[:split])
    words = argv[split + 1 :]
    if unknown:
        module = words[0] if words else None
        hints = "".join(f"\n  {hint}" for hint in hints_for(parser, unknown, argv[:split], module))
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}{hints}")
    if not words:
        parser.error("-m MODULE is missing: what is to run? (for example -m recipes.bert_mlm)")
    options.module, *options.arguments = words
    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--run-dir", "--run_dir", type=lambda text: Path(text).expanduser())
    return options, arguments.parse_known_args(options.arguments)[0].run_dir


def hints_for(
    parser: argparse.ArgumentParser, unknown: list[str], before: list[str], module: str | None
) -> list[str]:
    """Returns a line per unknown word before `-m` that has another name or place here.

    Args:
        parser: of the options of this launcher, or of Ray's.
        unknown: the words.
        before: all words before `-m`.
        module: the one after `-m`, or None.
    """
    own = re.findall(r"^ +(--[a-z-]+)", parser.format_help(), re.MULTILINE)
    hints = []
    for word in unknown:
        name = word.partition("=")[0]
        spelled = name.replace("_", "-")
        near = difflib.get_close_matches(spelled, own, n=1, cutoff=0.75)
        hint = ELSEWHERE.get(spelled) or (f"did you mean {near[0]}?" if near else "")
        # Ray's launcher does not have all of them.
        is_here = set(re.findall("--[a-z-]+", hint)).intersection(OWN_OPTIONS) <= set(own)
        if word.startswith("-"):
            hints += [f"{name}: {hint}"] if hint and is_here else []
        elif module is None and module_problem(module_of(word)) is None:
            words = ["-m", module_of(word), *before[before.index(word) + 1 :]]
            hints.append(f"{word}: a module comes after -m: {shlex.join(words)}")
            break  # its arguments follow
    if not hints and module is not None:
        hints.append(f"options of {module} come after -m {module}")
    return hints


def module_of(path: str) -> str:
    """Returns the name of the module in a file of this folder or PYTHONPATH; other texts as is."""
    if not path.endswith(".py"):
        return path
    file = Path(path).resolve()
    folders = [Path(folder or os.curdir).resolve() for folder in ("", *sys.path)]
    names = [
        ".".join(file.relative_to(f).with_suffix("").parts) for f in folders if f in file.parents
    ]
    return min(names, key=lambda name: name.count("."), default=path)


def find_problems(options: argparse.Namespace, run_dir: Path | None) -> list[str]:
    """Lists incompatible options, and problems of this host, one per line."""
    problems = []
    unknown = module_problem(options.module)
    if unknown:
        problems.append(unknown)
    if options.module.startswith("recipes."):  # they have no such options
        names = [word.partition("=")[0] for word in options.arguments]
        problems += [
            f"{name}: goes before -m" for name in names if name.replace("_", "-") in OWN_OPTIONS
        ]
    workers, hosts, rank = options.nproc_per_node, options.hosts, options.node_rank
    try:
        tasks = slurm_tasks()
    except DistributionError as error:
        problems.append(str(error))
        tasks = 1
    if os.environ.get("TF_CONFIG") or tasks > 1:
        problems.append(
            "TF_CONFIG is set, or SLURM starts the tasks; start without the launcher:"
            f" python -m {options.module} ..."
        )
    if 0 < len(options.gpus) < workers:
        problems.append(
            f"--nproc-per-node {workers}: only {len(options.gpus)} GPUs are visible on this host"
            " (CUDA_VISIBLE_DEVICES=-1 trains on the CPU)"
        )
    if len(hosts) > 1:
        if len(set(hosts)) < len(hosts) or "" in hosts or ":" in "".join(hosts):
            problems.append("--hosts: expected different names or IPv4 addresses, without ports")
        if rank is None:
            problems.append("--hosts needs --node-rank, the position of this host, from 0")
        if options.ps:
            problems.append("--ps runs on one machine; leave out --hosts")
        if run_dir is None:
            problems.append(f"--hosts needs a shared disk: -m {options.module} --run-dir ...")
    if rank is not None and rank >= len(hosts):
        problems.append(f"--node-rank {rank}: --hosts has {len(hosts)} names")
    if run_dir is not None:
        problems += run_dir_problems(options.module, run_dir)
    return problems


def run_dir_problems(module: str, run_dir: Path) -> list[str]:
    """Returns one line if a module cannot use a folder as `--run-dir`, otherwise none."""
    try:
        # A module that is not a recipe may keep any files in its folder.
        if module.startswith("recipes."):
            return not_a_run(run_dir)
        (run_dir / "results.json").exists()  # raises for a name that the file system rejects
    except OSError as error:
        return [f"--run-dir {run_dir}: {error.strerror}"]
    return []


def module_problem(module: str) -> str | None:
    """Returns a line about a module that `python -m` would not find, or None; imports nothing."""

    def find(name: str, folders):
        specs = (each.find_spec(name, folders) for each in sys.meta_path)
        try:
            return next(filter(None, specs), None)
        except KeyError:  # within a folder without an __init__.py, which Python has not imported
            return PathFinder.find_spec(name.rpartition(".")[2], folders)

    names, folders = module.split("."), None  # folders of a package
    for count, last in enumerate(names, start=1):
        spec = find(".".join(names[:count]), folders) if last else None  # "./own.py"
        if spec is not None and spec.loader is None:  # folders without an __init__.py
            paths = [os.path.join(parent, last) for parent in folders or sys.path]
            folders = [path for path in paths if os.path.isdir(path)]
        else:
            folders = spec and spec.submodule_search_locations
        if spec is None or (folders is None and count < len(names)):
            is_path = "/" in module or module.endswith(".py")
            hint = "write its name, not its file's" if is_path else "looked here and in PYTHONPATH"
            name = module_of(module)
            if name != module and module_problem(name) is None:
                hint += f": -m {name}"
            return f"-m {module}: no such module; {hint}"
    if folders is not None and find(f"{module}.__main__", folders) is None:
        return f"-m {module}: a package without __main__.py; name one of its modules"
    return None


# --- What each process gets ---


def make_folder(options: argparse.Namespace) -> list[Path]:
    """Creates a new folder for a run without `--run-dir`, and passes it to all processes.

    Returns:
        The folders that were created, innermost first.

    Raises:
        OSError: The folder cannot be created.
    """
    options.run_dir, made = make_new_folder(options.module.rpartition(".")[2])
    for words in (options.arguments, options.command):
        words += ["--run-dir", str(options.run_dir)]
    return made


def own_tasks(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Lists the tasks of this host as pairs (type, index)."""
    first = options.node_rank * options.nproc_per_node
    tasks = [("worker", first + i) for i in range(options.nproc_per_node)]
    if options.ps:
        tasks = [("ps", i) for i in range(options.ps)] + tasks + [("chief", 0)]
    return tasks


def build_cluster(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the tasks of all hosts in the format of `TF_CONFIG`: HOST:PORT by task type.

    Raises:
        OSError: A port is in use.
    """
    workers, host = options.nproc_per_node, options.hosts[options.node_rank]
    count = len(own_tasks(options))
    if options.base_port:
        ports = list(range(options.base_port, options.base_port + count))
        for port in ports:
            # TensorFlow would not notice: it shares ports, so two runs would mix.
            if not can_listen(host, port):
                raise OSError(f"{host}:{port} is in use; does another run use --base-port?")
    else:
        candidates = random.sample(FREE_PORTS, len(FREE_PORTS))
        free = (port for port in candidates if can_listen("", port))
        ports = list(itertools.islice(free, count))
    cluster = {"worker": [f"{host}:{port}" for host in options.hosts for port in ports[:workers]]}
    if options.ps:
        chief, *servers = [f"{host}:{port}" for port in ports[workers:]]
        cluster |= {"chief": [chief], "ps": servers}
    return cluster


def can_listen(host: str, port: int) -> bool:
    """Tells whether a port is free. An address of another machine counts as free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not matter
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def connection_error(address: str) -> str | None:
    """Returns why a connection to HOST:PORT fails; None if it works."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def visible_gpus() -> list[str]:
    """Lists the GPUs that TensorFlow would see, in the format of CUDA_VISIBLE_DEVICES."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None and shutil.which("nvidia-smi"):
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return re.findall(r"^GPU (\d+):", result.stdout, flags=re.MULTILINE)
    return [name for name in (listed or "").split(",") if name not in ("", "-1")]


def own_cores() -> list[int]:
    """Lists the logical cores of this process, the hardware threads of one core together."""

    def place(core: int) -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError):  # "0,4" or "0-1", from Linux
            threads = (CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
            return int(re.split("[,-]", threads)[0]), core
        return core, core

    return sorted(os.sched_getaffinity(0), key=place)


def equal_share(things: list, options: argparse.Namespace, task: str, index: int) -> list:
    """Returns a worker's GPUs or cores; the same number each, as all workers train in step."""
    if task != "worker":
        return []
    each = len(things) // options.nproc_per_node
    first = index % options.nproc_per_node * each
    return things[first : first + each]


def environment_of(
    options: argparse.Namespace, cluster: dict[str, list[str]], task: str, index: int
) -> dict[str, str]:
    """Returns the environment of a process; keeps numbers of threads set by the user."""
    config = {"cluster": cluster, "task": {"type": task, "index": index}}
    environment = {
        "TF_CONFIG": json.dumps(config),
        "PYTHONUNBUFFERED": "1",
        LAUNCHED: "1",
    }
    if task != "worker":  # TensorFlow would claim the memory of every visible GPU
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    elif options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            equal_share(options.gpus, options, task, index)
        )
    threads, cores = {}, equal_share(options.cores, options, task, index)
    if cores:
        threads = dict.fromkeys(THREADS, str(len(cores)))
    return threads | os.environ | environment


# --- Processes ---


@dataclasses.dataclass
class Child:
    """A process of the run."""

    task: str
    index: int
    process: subprocess.Popen
    log: Path
    log_start: int  # offset of this process's part of the log, in bytes

    @property
    def status(self) -> int | None:
        """Returns the exit status as in a shell, 128 + n after signal n; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def kill(self) -> None:
        """Sends SIGKILL to the whole session of the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """Describes in one line how the process ended, with its last output and its log."""
        code, name = self.process.returncode, f"{self.task} {self.index}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}  # not all have one
            killer = names.get(-code, f"signal {-code}")
            return f"{name} was killed by {killer}; its log: {self.log}"
        text = read_log(self.log, self.log_start, is_last=True).decode(errors="replace")
        last_line = text.strip().rpartition("\n")[2][:200]
        return f"{name} ended with exit status {code} ({last_line}); its log: {self.log}"


def start_process(
    task: str, index: int, words: list[str], log: Path, environment: dict, cores: list[int]
) -> Child:
    """Starts Python with these arguments; it dies with this process and appends to the log."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:  # in the child, before Python starts
        if prctl:
            prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        if cores:
            os.sched_setaffinity(0, cores)

    with open(log, "ab") as file:
        start = file.tell()  # the file offset is shared with the process
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only the launcher
            preexec_fn=prepare,
        )
        return Child(task, index, process, log, start)


def read_log(log: Path, position: int, is_last: bool) -> bytes:
    """Returns the new part of a log; only whole lines until the process has ended.

    Nothing of a log that cannot be read, which a shared disk may cause: the run does not need it.
    """
    text = b""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(position)
        text = file.read()
    # Progress bars end their lines with a carriage return.
    return text if is_last else text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]


# --- A run ---


class Requests:
    """Handles requests to stop a run: passes the first signal on as SIGTERM; a second one kills."""

    request: int | None = None
    request_time = 0.0
    killed_by: int | None = None

    def listen(self) -> None:
        """Installs the signal handlers, but not for signals that are ignored."""
        for number in HANDLED:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, the background
                signal.signal(number, self.take_signal)

    def take_signal(self, number: int, frame: object) -> None:
        """Records a request to stop, as a signal handler; the loop acts on it."""
        now = time.monotonic()
        if self.request is None:
            self.request, self.request_time = number, now
        elif now - self.request_time > SAME_REQUEST_SECONDS:
            self.killed_by = number


class Launch(Requests):
    """A run from its first process to its last.

    Args:
        options: The result of `read_options()`.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.restarted: dict[str, str] = {}  # environment of processes that continue this launch

    def run(self) -> int:
        """Starts the processes, restarts them if necessary, and returns the exit status."""
        options, restarts = self.options, 0
        self.listen()
        try:
            if options.run_dir is None:
                self.made = make_folder(options)
            else:
                self.made = missing_folders(options.run_dir)
            is_new = not (options.run_dir / "options.json").exists()
        except OSError as error:
            say(f"cannot start the processes: {error}")
            return WRONG_OPTIONS
        self.results_before = self.results_time()
        workers = options.nproc_per_node * len(options.hosts)
        servers = f", parameter servers: {options.ps}" if options.ps else ""
        say(f"workers: {workers}{servers}; logs in {options.run_dir}")
        while True:
            status = self.run_once()
            if status in (0, *DELIBERATE) or self.request or restarts == options.max_restarts:
                break
            restarts += 1
            if is_new:
                self.restarted[RESTARTED] = "1"
            say(f"starting all processes again, restart {restarts} of {options.max_restarts}")
        if status == WRONG_OPTIONS:
            self.remove_logs()
        if status == SAVED_AND_STOPPED:
            say(f"stopped. Resume with:\n  {resuming(options.command)}")
        return status

    def run_once(self) -> int:
        """Starts every process of this host, waits for their end, and leaves none running."""
        options = self.options
        self.children: list[Child] = []
        self.ended: list[Child] = []  # those that have ended, in that order
        self.deadline = float("inf")  # for the others, after one has failed or was stopped
        try:
            try:
                cluster = build_cluster(options)
                options.run_dir.mkdir(parents=True, exist_ok=True)
                for task, index in own_tasks(options):
                    self.children.append(self.start(cluster, task, index))
            except OSError as error:  # of a port, process or log file
                say(f"cannot start the processes: {error}")
                return WRONG_OPTIONS
            firsts = cluster["worker"][:: options.nproc_per_node]
            return self.supervise([a for a in firsts if a != firsts[options.node_rank]])
        finally:
            for child in self.children:
                child.kill()
                child.process.wait()

    def remove_logs(self) -> None:
        """Removes the folders that this launcher made if all processes refused their options.

        The reason was shown. Other hosts may still write there, or another launch that made the
        folder at the same time: its run holds the lock.
        """
        folder, logs = self.options.run_dir, {child.log for child in self.children}
        refused = all(child.status == WRONG_OPTIONS for child in self.children)
        if not self.made or not refused or len(self.options.hosts) > 1:
            return
        with contextlib.suppress(OSError):
            if set(folder.iterdir()) <= {*logs, folder / ".lock"}:
                with open(folder / ".lock", "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                remove_empty(self.made[1:])
                if logs:
                    say(f"{folder}: removed, it held only the logs of this error")

    def start(self, cluster: dict[str, list[str]], task: str, index: int) -> Child:
        """Starts a process of the run."""
        options = self.options
        return start_process(
            task,
            index,
            ["-m", options.module, *options.arguments],
            options.run_dir / f"{task}-{index}.log",
            environment_of(options, cluster, task, index) | self.restarted,
            equal_share(options.cores, options, task, index),
        )

    def supervise(self, silent: list[str]) -> int:
        """Waits for the end of the run; returns its exit status. Some processes may still run.

        Args:
            silent: HOST:PORT of a worker on each other host.
        """
        options, began, is_asked = self.options, time.monotonic(), False
        # Shows the output of the coordinator, or of this host's first worker.
        shown = self.children[-1 if options.ps else 0]
        position = shown.log_start
        while True:
            if self.request and not is_asked:
                is_asked = True
                # It would end the servers, and then the coordinator could not save.
                for child in [shown] if options.ps else self.children:
                    child.process.terminate()
                self.request_time, self.killed_by = time.monotonic(), None  # a second one is later
                say("asking the processes to save and stop; a second request kills them")
            is_over = len(self.ended) == len(self.children) or time.monotonic() >= self.deadline
            text = read_log(shown.log, position, is_over)
            culprit = self.notice_ends()
            # After another process has failed, this one may only report that.
            is_well = culprit is None or culprit is shown or culprit.status in (0, *DELIBERATE)
            if is_well or options.ps or self.request:
                rest = show(text)
                position += len(text) - len(rest)
                if is_over:
                    self.show_rest(rest)
            if is_over:
                return self.outcome(culprit) if culprit else 0
            if self.killed_by:
                return 128 + self.killed_by
            reason = connection_error(silent[0]) if silent else None
            if silent and reason is None:
                silent.pop(0)
            elif silent and is_asked:
                # TensorFlow waits for that host and does not let Python handle the signal.
                if time.monotonic() - self.request_time > UNCONNECTED_SECONDS:
                    return SAVED_AND_STOPPED  # no step can have been trained
            elif silent and time.monotonic() - began > START_SECONDS:
                say(
                    f"no answer within {START_SECONDS} s from {silent[0]} ({reason}); does the"
                    " launcher run there, with the same --hosts, --nproc-per-node and --base-port?"
                )
                return WRONG_OPTIONS
            time.sleep(POLL_SECONDS)

    def show_rest(self, text: bytes) -> None:
        """Waits for a reader of the last output, only some seconds if asked to stop."""
        for child in self.children:
            child.kill()
        while text and not self.request:
            text = show(text, POLL_SECONDS)
        show(text, OUTPUT_SECONDS)

    def notice_ends(self) -> Child | None:
        """Handles processes that have ended; returns the one that decides the exit status."""
        ended = [c for c in self.children if c not in self.ended and c.status is not None]
        # Python exits with 1 after any exception, also after a lost connection to a failed process.
        for child in sorted(ended, key=lambda child: child.status == 1):
            child.kill()  # child processes in its session
            others = any(c.task == "worker" and c.status is None for c in self.children)
            is_lost = self.options.ps and child.task == "worker" and child.status not in DELIBERATE
            if is_lost and (others or self.request):
                say(f"{child.describe_end()}; the run continues without it")
                self.children.remove(child)
                continue
            self.ended.append(child)
            status = self.outcome(child)
            if status not in (0, SAVED_AND_STOPPED) and child is self.culprit():
                say(child.describe_end())
            if status or child.task == "chief":
                may_save = (status in DELIBERATE or self.request) and not self.options.ps
                seconds = SAVE_SECONDS if may_save else 0
                self.deadline = min(self.deadline, time.monotonic() + seconds)
        return self.culprit()

    def culprit(self) -> Child | None:
        """Returns the first process that failed, else the first that stopped, else the first."""
        order = {SAVED_AND_STOPPED: 1, 0: 2}
        return min(self.ended, key=lambda c: order.get(self.outcome(c), 0), default=None)

    def outcome(self, child: Child) -> int:
        """Maps a process's exit status to the run's.

        A process that died of the forwarded SIGTERM did not handle it yet, since it was importing,
        and no step is lost; or no longer, since the run has written its results.
        """
        if self.request and child.process.returncode == -signal.SIGTERM:
            return SAVED_AND_STOPPED if self.results_time() == self.results_before else 0
        return child.status or 0

    def results_time(self) -> int | None:
        """Returns the time when the run's results were written, or None."""
        with contextlib.suppress(OSError):
            return (self.options.run_dir / "results.json").stat().st_mtime_ns
        return None
