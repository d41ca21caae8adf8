"""Starts a recipe in several processes, on one machine or on a fixed list of hosts.

    python -m distribution.launch --nproc-per-node 2 -m recipes.bert_mlm --epochs 1

Each process gets a `TF_CONFIG`, a share of the GPUs (without GPUs: of the cores) and a log file.
The launcher never imports TensorFlow: it starts at once and takes no memory on a GPU.
"""

import argparse
import ctypes
import dataclasses
import datetime
import errno
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distribution.version import version_line

WRONG_OPTIONS = 2  # exit status of a command that cannot work; trying again is no use
SAVED_AND_STOPPED = 75  # exit status of a recipe that was asked to stop, and saved
DELIBERATE = (WRONG_OPTIONS, SAVED_AND_STOPPED)  # the other workers end likewise, by themselves
DEFAULT_BASE_PORT = 22200
# Below the range from which Linux takes the ports of outgoing connections (32768 and up): one found
# there could be in use before TensorFlow listens.
FREE_PORTS = range(20000, 32000)
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
POLL_SECONDS = 0.1
POLLING = threading.Lock()  # two threads that poll at once are told that the process still runs
SAME_REQUEST_SECONDS = 0.5  # `timeout`, `docker stop` and others may deliver one request twice
STOP_SECONDS = 10  # from SIGTERM to SIGKILL, for the survivors of a failure
SAVE_SECONDS = 30  # for the others to end, once one worker has ended deliberately

EXAMPLES = """\
one machine, two workers (with GPUs: half of them each):
  python -m distribution.launch --nproc-per-node 2 -m recipes.bert_mlm --epochs 1

one machine, two workers and a parameter server:
  python -m distribution.launch --nproc-per-node 2 --ps 1 -m recipes.bert_mlm

two machines: the same command on each, with its own --node-rank (here on the second)
  python -m distribution.launch --hosts 10.0.0.1,10.0.0.2 --node-rank 1 \\
      -m recipes.bert_mlm --run-dir /shared/runs/first

Ctrl-C (or SIGTERM) asks the processes to save and stop, a second one kills them.
exit status: that of the first process that failed; 128 + n if signal n killed it; 75 if the run
saved and stopped (the same command resumes it); 2 if the options are wrong.
Ports are neither encrypted nor protected by a password: private networks only.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    return Launch(read_options(sys.argv[1:] if argv is None else argv)).run()


def say(text: str, speaker: str = "launch") -> None:
    """Prints a line of the launcher's own. A closed terminal must not end a run."""
    try:
        print(f"{speaker}: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass


# --- Options ---


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole line; all after `-m MODULE` is the module's."""
    parser = argparse.ArgumentParser(
        prog="python -m distribution.launch",
        usage="python -m distribution.launch [options] -m MODULE [options of the module]",
        description="Start a recipe in several processes, on one machine or on several.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=version_line())
    add(
        "--nproc-per-node",
        metavar="P",
        type=whole_number(1, 1024),
        default=1,
        help="workers on each host (default 1)",
    )
    add(
        "--ps",
        metavar="K",
        type=whole_number(0, 1024),
        default=0,
        help="parameter servers, on one machine (default 0: workers train in step). They and the"
        " coordinator ('chief') are separate processes",
    )
    add(
        "--hosts",
        metavar="HOST0,HOST1,...",
        type=host_names,
        default=["localhost"],
        help="names or IPv4 addresses of all hosts, the same list and the same P on each; the"
        " first host is the chief's",
    )
    add(
        "--node-rank",
        metavar="R",
        type=whole_number(0, 1023),
        help="position of this host in --hosts, from 0",
    )
    add(
        "--base-port",
        metavar="N",
        type=whole_number(1024, 65535),
        help="worker i of a host listens at port N + i (default: free ports;"
        f" {DEFAULT_BASE_PORT} with --hosts)",
    )
    add(
        "--start-timeout",
        metavar="S",
        type=whole_number(1, 10**6),
        default=300,
        help="seconds to wait for the other hosts (default 300)",
    )
    add(
        "--max-restarts",
        metavar="X",
        type=whole_number(0, 10**6),
        default=0,
        help="how often to start the processes again after one has died (default 0); not after"
        " exit status 2 or 75. A worker beside parameter servers is started again alone",
    )
    add("--log-dir", metavar="D", help="folder of the logs (default: the run directory)")
    add(
        "--no-pin-cores",
        dest="pin_cores",
        action="store_false",
        help="let the workers of this host share all its cores. By default, without GPUs, each gets"
        " its own cores and as many threads",
    )
    add(
        "-m",
        metavar="MODULE",
        dest="module",
        help="what to run, like python's -m; everything after it goes to the module. Without"
        " --run-dir there, the launcher passes runs/MODULE/DATE-TIME",
    )
    return parser


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Returns a type for argparse: a whole number within bounds."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
            found = text if len(text) < 20 else f"{text[:20]}..."
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {low} to {high}, found {found!r}"
            )
        return int(text)

    return parse


def host_names(text: str) -> list[str]:
    """Splits a list of different host names or IPv4 addresses; a type for argparse."""
    hosts = text.split(",")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", host) or hosts.count(host) > 1:
            raise argparse.ArgumentTypeError(
                "expected different names or IPv4 addresses, without ports, separated by commas;"
                f" found {host[:60]!r}"
            )
    return hosts


def read_options(argv: list[str]) -> argparse.Namespace:
    """Reads and checks the command line.

    Args:
        argv: Arguments, without the name of the program.

    Returns:
        The options, with what follows from them: `module` (a name), `arguments` (always with
        `--run-dir`), `run_dir`, `log_dir`, `gpus`, `cores` and `command`, which resumes the run.

    Raises:
        SystemExit: With status 2, after a message that names what is wrong.
    """
    parser = make_parser()
    options, run_dir = split_options(parser, argv)
    options.gpus = visible_gpus()
    problems = find_problems(options, run_dir)
    if problems:
        parser.exit(WRONG_OPTIONS, "".join(f"launch: {problem}\n" for problem in problems))
    if {"-h", "--help"} & set(options.arguments):  # one process answers that
        os.execv(sys.executable, [sys.executable, "-m", options.module, *options.arguments])
    if run_dir is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = Path("runs", options.module.rpartition(".")[2], stamp)
        argv = [*argv, "--run-dir", str(run_dir)]
        options.arguments += argv[-2:]
    options.command = ["python", "-m", "distribution.launch", *argv]
    options.run_dir = run_dir
    options.log_dir = Path(options.log_dir).expanduser() if options.log_dir else options.run_dir
    options.node_rank = options.node_rank or 0
    if len(options.hosts) > 1:
        options.base_port = options.base_port or DEFAULT_BASE_PORT
    workers, cores = options.nproc_per_node, usable_cores()
    pins = options.pin_cores and not options.gpus and 1 < workers <= len(cores)
    options.cores = cores if pins else []
    problems = check_machine(options)
    if problems:
        parser.exit(WRONG_OPTIONS, "".join(f"launch: {problem}\n" for problem in problems))
    return options


def split_options(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, Path | None]:
    """Parses what stands before `-m`; keeps the `module` and its `arguments`.

    Returns:
        The options, and the `--run-dir` among the arguments; None where there is none.
    """
    # Split by hand: argparse would take a `--` out of the module's arguments.
    split = argv.index("-m") if "-m" in argv else len(argv)
    options, words = parser.parse_args(argv[:split]), argv[split + 1 :]
    if not words:
        parser.error("-m MODULE is missing: what is to run? (for example -m recipes.bert_mlm)")
    options.module, *options.arguments = words
    arguments = argparse.ArgumentParser(prog=options.module, add_help=False, allow_abbrev=False)
    arguments.add_argument("--run-dir", "--run_dir", type=lambda text: Path(text).expanduser())
    return options, arguments.parse_known_args(options.arguments)[0].run_dir


def find_problems(options: argparse.Namespace, run_dir: Path | None) -> list[str]:
    """Lists what does not go together, a line each."""
    problems = []
    workers, hosts, gpus = options.nproc_per_node, options.hosts, options.gpus
    if len(hosts) > 1 and options.node_rank is None:
        problems.append("--hosts needs --node-rank: which of them is this one, from 0?")
    if options.node_rank is not None and options.node_rank >= len(hosts):
        problems.append(f"--node-rank {options.node_rank}: --hosts has {len(hosts)} names")
    if len(hosts) > 1 and options.ps:
        problems.append("--ps runs on one machine; leave out --hosts")
    if len(hosts) > 1 and run_dir is None:
        problems.append(f"--hosts needs a disk that all share: -m {options.module} --run-dir ...")
    last = (options.base_port or 0) + count_ports(options) - 1
    if last > 65535:
        problems.append(f"ports {options.base_port} to {last} are needed, and they end at 65535")
    if 0 < len(gpus) < workers:
        problems.append(
            f"--nproc-per-node {workers}: only {len(gpus)} GPUs are visible on this host"
            " (CUDA_VISIBLE_DEVICES=-1 trains on the CPU)"
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    if os.environ.get("TF_CONFIG"):
        problems.append(
            f"TF_CONFIG is set; start without the launcher: python -m {options.module} ..."
        )
    elif tasks != "1":
        problems.append(
            f"SLURM runs {tasks} tasks; start without the launcher: srun python -m"
            f" {options.module} ..."
        )
    return problems


def check_machine(options: argparse.Namespace) -> list[str]:
    """Makes the folder of the logs; lists why this host cannot run the processes, a line each."""
    problems = []
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        # A module that is no recipe may have there what it likes.
        if options.module.startswith("recipes.") and options.log_dir == options.run_dir:
            problems += not_a_run(options.run_dir)
    except OSError as error:
        problems.append(f"{options.log_dir}: no logs can be written there ({error.strerror})")
    if options.base_port:
        host = options.hosts[options.node_rank]
        for port in range(options.base_port, options.base_port + count_ports(options)):
            # TensorFlow would not notice: it shares its ports, and two runs would mix.
            if not can_listen(host, port):
                problems.append(f"{host}:{port} is in use; does another run use --base-port?")
    return problems


def not_a_run(folder: Path) -> list[str]:
    """Returns a line where a folder contains files but no run.

    Raises:
        OSError: It cannot be read.
    """
    # What the launcher and the run write before options.json.
    ours = re.compile(r"\.lock|(worker|ps)-\d+\.log|chief\.log|\.options\.json\.\d+")
    names = sorted(path.name for path in folder.iterdir() if not ours.fullmatch(path.name))
    if not names or (folder / "options.json").exists():
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        f"--run-dir {folder}: not a run directory (contains {', '.join(names[:3])}{more});"
        " pass a new or empty one"
    ]


# --- What each process gets ---


def own_tasks(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Lists the tasks of this host as pairs of type and index."""
    first = options.node_rank * options.nproc_per_node
    tasks = [("worker", first + i) for i in range(options.nproc_per_node)]
    if options.ps:
        tasks = [("ps", i) for i in range(options.ps)] + tasks + [("chief", 0)]
    return tasks


def log_of(options: argparse.Namespace, task: str, index: int) -> Path:
    """Returns the log file of a task."""
    return options.log_dir / ("chief.log" if task == "chief" else f"{task}-{index}.log")


def build_cluster(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the tasks of all hosts as `TF_CONFIG` has them: HOST:PORT by task type.

    Raises:
        OSError: There are not enough free ports.
    """
    workers, count = options.nproc_per_node, count_ports(options)
    if options.base_port:
        ports = list(range(options.base_port, options.base_port + count))
    else:
        candidates = random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS))
        free = (port for port in candidates if can_listen("", port))
        ports = [port for port, _ in zip(free, range(count), strict=False)]
        if len(ports) < count:
            raise OSError(f"{count} ports are needed, {len(ports)} are free")
    cluster = {"worker": [f"{host}:{port}" for host in options.hosts for port in ports[:workers]]}
    if options.ps:
        chief, *servers = [f"{options.hosts[0]}:{port}" for port in ports[workers:]]
        cluster |= {"chief": [chief], "ps": servers}
    return cluster


def count_ports(options: argparse.Namespace) -> int:
    """Counts the ports that a host needs: workers', and the coordinator's beside servers."""
    return options.nproc_per_node + (options.ps + 1 if options.ps else 0)


def can_listen(host: str, port: int) -> bool:
    """Tells whether a port is free. An address that is not of this machine counts as free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do no harm
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def why_silent(address: str) -> str | None:
    """Returns why nobody answers at HOST:PORT; None if somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def visible_gpus() -> list[str]:
    """Lists the GPUs that TensorFlow would see, as CUDA_VISIBLE_DEVICES writes them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        hidden = [i for i, name in enumerate(names) if name in ("", "-1")]
        return names[: hidden[0]] if hidden else names  # CUDA stops at the first invalid one
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return re.findall(r"^GPU (\d+):", found.stdout, flags=re.MULTILINE)


def usable_cores() -> list[int]:
    """Lists the cores that this process may use; empty where it cannot choose (only Linux can)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def share_of(things: list, options: argparse.Namespace, task: str, index: int) -> list:
    """Returns a worker's part of GPUs or cores; equally many, as all workers train in step."""
    if task != "worker":
        return []
    each = len(things) // options.nproc_per_node
    first = index % options.nproc_per_node * each
    return things[first : first + each]


def environment_of(
    options: argparse.Namespace, cluster: dict[str, list[str]], task: str, index: int
) -> dict[str, str]:
    """Returns the environment of a process; threads that the user has set stay."""
    config = {"cluster": cluster, "task": {"type": task, "index": index}}
    environment = {
        "TF_CONFIG": json.dumps(config),
        "PYTHONUNBUFFERED": "1",
        "KERAS_RECIPES_LAUNCHED": "1",
    }
    if task != "worker":  # TensorFlow would claim the memory of every GPU that it sees
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    elif options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share_of(options.gpus, options, task, index))
    cores = share_of(options.cores, options, task, index)
    if cores:
        environment |= dict.fromkeys(THREADS, str(len(cores)))
        if options.ps:
            # A function that waits for the parameter servers holds such a thread: with only one a
            # worker waits forever (TensorFlow's guide to ParameterServerStrategy takes 4).
            environment["TF_NUM_INTEROP_THREADS"] = str(max(4, len(cores)))
    kept = {name: os.environ[name] for name in THREADS if name in os.environ}
    return os.environ | environment | kept


# --- Processes ---


@dataclasses.dataclass
class Child:
    """A process of the run."""

    task: str
    index: int
    process: subprocess.Popen
    log: Path
    log_start: int  # where this process's part of the log begins, in bytes
    noticed: bool = False  # its end has been dealt with

    @property
    def name(self) -> str:
        """Its task, for messages."""
        return "chief" if self.task == "chief" else f"{self.task} {self.index}"

    @property
    def status(self) -> int | None:
        """Exit status as a shell gives it: 128 + n after signal n. None while it runs."""
        with POLLING:
            code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def failed(self) -> bool:
        """Whether it died, of itself or by somebody else."""
        return self.status not in (None, 0, *DELIBERATE)

    def kill(self) -> None:
        """Sends SIGKILL to the whole session of the process."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def describe_end(self) -> str:
        """Says in one line how it ended, its last words, and where its log is."""
        code = self.process.returncode
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}; its log: {self.log}"
        with open(self.log, "rb") as file:
            file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
        said = next((f" ({line.strip()[:200]})" for line in lines[::-1] if line.strip()), "")
        return f"{self.name} ended with exit status {code}{said}; its log: {self.log}"


def likely_cause(child: Child) -> tuple[bool, bool]:
    """Orders processes that ended at the same time: which failed first?

    A signal from outside follows no other failure, and neither do wrong options and a request to
    stop. Any other failure may be a lost connection to one of those.
    """
    code = child.process.returncode
    return code >= 0, code not in DELIBERATE


def start(
    options: argparse.Namespace, cluster: dict[str, list[str]], task: str, index: int
) -> Child:
    """Starts a process of the run; it appends to its log."""
    return start_process(
        task,
        index,
        ["-m", options.module, *options.arguments],
        log_of(options, task, index),
        environment_of(options, cluster, task, index),
        share_of(options.cores, options, task, index),
    )


def start_process(
    task: str, index: int, words: list[str], log: Path, environment: dict, cores: list[int]
) -> Child:
    """Starts Python with these words; the process dies with this one and appends to the log."""
    prctl, parent = ctypes.CDLL(None).prctl if sys.platform == "linux" else None, os.getpid()

    def prepare() -> None:  # in the child, before it runs Python
        if prctl:
            prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # which has died already
                os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C reaches the launcher only
            preexec_fn=prepare,
        )
        return Child(task, index, process, log, file.tell())


def read_log(log: Path, position: int, is_last: bool) -> bytes:
    """Returns what a log has grown by, in whole lines while more may come."""
    with open(log, "rb") as file:
        file.seek(position)
        text = file.read()
    # Progress bars end their lines with a carriage return.
    return text if is_last else text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]


class Relay(threading.Thread):
    """Copies a log to the terminal as it grows, whole lines at a time.

    The process writes into its log and never waits for the terminal; this thread may.

    Args:
        child: Whose log.
        is_held: Tells, after the log was read, whether to hold back what is new: another process
            has died, and this one may be complaining about that.
    """

    def __init__(self, child: Child, is_held: Callable[[], bool]):
        super().__init__(daemon=True)
        self.log, self.position, self.is_held = child.log, child.log_start, is_held
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Copies until `finish`."""
        is_last = False
        while not is_last:
            is_last = self.ended.wait(POLL_SECONDS)
            text = read_log(self.log, self.position, is_last)
            if self.is_held():
                continue
            self.position += len(text)
            try:
                while text:
                    text = text[os.write(1, text) :]
            except OSError:  # the terminal is closed; the log has it all
                return

    def finish(self) -> None:
        """Copies the rest, and ends."""
        self.ended.set()
        self.join(timeout=5)


class OtherHosts(threading.Thread):
    """Connects to the first worker of each other host until it has answered once."""

    def __init__(self, addresses: list[str]):
        super().__init__(daemon=True)
        self.silent = dict.fromkeys(addresses, "not tried yet")  # with the reason
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Tries until all have answered, or `ended` is set."""
        while self.silent and not self.ended.wait(0.5):
            for address in list(self.silent):
                reason = why_silent(address)
                if reason is None:
                    del self.silent[address]
                else:
                    self.silent[address] = reason


# --- A run ---


class Requests:
    """Signals that ask a run to stop: the first is passed on, a second one kills."""

    request: int | None = None
    request_time = 0.0
    killed_by: int | None = None

    def listen(self) -> None:
        """Takes the signals of this process from now on."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.take_signal)

    def take_signal(self, number: int, frame: object) -> None:
        """Notes a request to stop (the handler of signals); the loop acts on it."""
        now = time.monotonic()
        if self.request is None:
            self.request, self.request_time = number, now
        elif now - self.request_time > SAME_REQUEST_SECONDS:
            self.killed_by = number

    @property
    def passed_on(self) -> int | None:
        """The signal that the processes get for the one that this process got."""
        return signal.SIGTERM if self.request == signal.SIGHUP else self.request


class Launch(Requests):
    """A run from its first process to its last.

    Args:
        options: From `read_options()`.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.children: list[Child] = []
        self.cluster: dict[str, list[str]] = {}
        self.culprit: Child | None = None  # the process that decides the exit status
        self.restarts = 0
        self.results_before = self.results_time()

    def run(self) -> int:
        """Starts the processes, again if need be, and returns the exit status."""
        options = self.options
        self.listen()
        workers = options.nproc_per_node * len(options.hosts)
        servers = f", parameter servers: {options.ps}" if options.ps else ""
        say(f"workers: {workers}{servers}; logs in {options.log_dir}")
        if options.cores:
            each = len(options.cores) // options.nproc_per_node
            say(f"each worker is pinned to its own cores, {each} each (or --no-pin-cores)")
        while True:
            try:
                status = self.run_once()
            except OSError as error:  # no port, no process or no log file
                say(f"cannot start the processes: {error}")
                return WRONG_OPTIONS
            if status in (0, *DELIBERATE) or self.request:
                break
            if self.restarts >= options.max_restarts:
                break
            self.restarts += 1
            say(f"starting all processes again, restart {self.restarts} of {options.max_restarts}")
        if status == SAVED_AND_STOPPED:
            saved = any(child.status == SAVED_AND_STOPPED for child in self.children)
            how = "saved and stopped" if saved else "stopped before training began"
            say(f"{how}. Resume with:\n  {shlex.join(options.command)}")
        return status

    def run_once(self) -> int:
        """Starts every process of this host, waits for the end, leaves none behind."""
        options, self.children, self.culprit = self.options, [], None
        self.cluster = build_cluster(options)
        each = options.nproc_per_node
        firsts = self.cluster["worker"][::each]
        firsts.pop(options.node_rank)
        hosts = relay = None
        try:
            for task in own_tasks(options):
                self.children.append(start(options, self.cluster, *task))
            shown = self.children[-1 if options.ps else 0]
            relay = Relay(shown, lambda: self.hides(shown))
            hosts = OtherHosts(firsts)
            return self.supervise(hosts)
        finally:
            self.stop()
            if hosts:
                hosts.ended.set()
            if relay:
                relay.finish()

    def hides(self, shown: Child) -> bool:
        """Tells whether the shown process may be complaining about the death of another one."""
        if self.options.ps or self.request or self.culprit is shown:
            return False
        return any(child.failed for child in self.children if child is not shown)

    def supervise(self, hosts: OtherHosts) -> int:
        """Waits until the run is over, and returns its exit status. Some may still run."""
        is_passed_on = False
        started, deadline = time.monotonic(), float("inf")
        while True:
            ended = [c for c in self.children if not c.noticed and c.status is not None]
            for child in sorted(ended, key=likely_cause):
                child.noticed = True
                child.kill()  # what it left in its session
                if child.status == 0 or self.continues_without(child):
                    continue
                # A failure counts more than the end that was asked for.
                if self.culprit is None or (
                    self.outcome(self.culprit) == SAVED_AND_STOPPED
                    and self.outcome(child) != SAVED_AND_STOPPED
                ):
                    self.culprit = child
                    if self.outcome(child) not in (0, SAVED_AND_STOPPED):
                        say(child.describe_end())
                    wait = child.status in DELIBERATE or self.request
                    deadline = time.monotonic() + (SAVE_SECONDS if wait else 0)
            status = self.outcome(self.culprit) if self.culprit else 0
            now, coordinator = time.monotonic(), self.children[-1]
            if all(child.noticed for child in self.children) or now >= deadline:
                return status
            if self.options.ps and (self.culprit or coordinator.noticed):
                for child in self.children:
                    child.kill()  # they have nothing to save
                return status
            if self.killed_by:
                say("killing the processes")
                return 128 + self.killed_by
            if self.request and not is_passed_on:
                is_passed_on = True
                name = signal.Signals(self.request).name
                say(f"{name}: asking the processes to stop; again kills them")
                # Servers would die of it, and then the coordinator could not save.
                for child in [coordinator] if self.options.ps else self.children:
                    child.process.send_signal(self.passed_on or self.request)
            if hosts.silent and now - started > self.options.start_timeout:
                silent = ", ".join(f"{host} ({why})" for host, why in hosts.silent.copy().items())
                say(
                    f"no answer within {self.options.start_timeout} s from {silent}; does the"
                    " launcher run there, with the same --hosts, --nproc-per-node and --base-port?"
                )
                return WRONG_OPTIONS
            time.sleep(POLL_SECONDS)

    def outcome(self, child: Child) -> int:
        """Returns the exit status that a process means for the run.

        One that died of the signal that was passed on does not handle it yet: it was importing, and
        nothing is lost. Or it handles it no more: the run has written its results.
        """
        if self.passed_on is not None and child.process.returncode == -self.passed_on:
            return SAVED_AND_STOPPED if self.results_time() == self.results_before else 0
        return child.status or 0

    def results_time(self) -> int | None:
        """Returns when the run's results were written; None where there are none."""
        try:
            return (self.options.run_dir / "results.json").stat().st_mtime_ns
        except OSError:
            return None

    def continues_without(self, child: Child) -> bool:
        """Tells whether a run with parameter servers survives the death of a worker.

        The worker is started again at its port while there are restarts left. Without any worker
        the coordinator would wait forever.
        """
        if not self.options.ps or child.task != "worker" or child.status == WRONG_OPTIONS:
            return False
        if self.request:
            return True
        again = self.restarts < self.options.max_restarts
        others = any(c.task == "worker" and c.status is None for c in self.children)
        if not again and not others:
            return False
        say(child.describe_end())
        if not again:
            say(f"the run continues without {child.name}")
            return True
        self.restarts += 1
        limit = self.options.max_restarts
        say(f"{child.name} is started again alone, restart {self.restarts} of {limit}")
        again_child = start(self.options, self.cluster, child.task, child.index)
        self.children[self.children.index(child)] = again_child
        return True

    def stop(self) -> None:
        """Ends what still runs: SIGTERM, then SIGKILL to whole sessions."""
        for child in self.children:
            if child.status is None and not self.killed_by:
                child.process.terminate()
        end = time.monotonic() + STOP_SECONDS
        while time.monotonic() < end and not self.killed_by:
            if all(child.status is not None for child in self.children):
                break
            time.sleep(POLL_SECONDS / 4)
        for child in self.children:
            child.kill()
            child.process.wait()


if __name__ == "__main__":
    sys.exit(main())
