"""Start a recipe in several processes, on one machine or on many, and look after them.

    python -m distribution.launch --nproc-per-node 2 -m recipes.bert_mlm --epochs 1

Every process gets a `TF_CONFIG`, a share of the GPUs and a log file. The launcher itself never
imports TensorFlow: it starts at once and holds no memory on a GPU. `--help` has the options,
`docs/many_machines.md` the rest.
"""

import argparse
import ctypes
import dataclasses
import datetime
import errno
import importlib.util
import json
import os
import pathlib
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
from collections.abc import Callable, Iterable

DEFAULT_BASE_PORT = 22200
# Free ports are looked for below the range from which Linux takes the ports of outgoing
# connections (32768 and up): one found there could be gone again before TensorFlow listens.
FREE_PORTS = range(20000, 32000)
WRONG_OPTIONS = 2  # exit status of a command that cannot work; trying again is no use
SAVED_AND_STOPPED = 75  # exit status of a recipe that was asked to stop, and saved
TAIL_LINES = 20
POLL_SECONDS = 0.1
# `timeout`, `docker stop` and their like may deliver one request twice.
SAME_REQUEST_SECONDS = 0.5
STOP_SECONDS = 10  # from SIGTERM to SIGKILL, for the survivors of a failure
SERVER_STOP_SECONDS = 2  # the same for servers whose coordinator has ended: nothing to save
SAVE_SECONDS = 30  # for the others, once one worker has saved and stopped
WATCH_SECONDS = 5  # between two looks at the parameter servers, from another host
GONE_SECONDS = 60  # without an answer from the parameter servers: their run is over

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
saved and stopped (the same command continues it); 2 if the options are wrong.
Ports are neither encrypted nor protected by a password: private networks only.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments, without the name of the program.

    Returns:
        The exit status.
    """
    plan = read_options(sys.argv[1:] if argv is None else argv)
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"cannot make the folder for the logs, {plan.log_dir}: {error.strerror}")
        return WRONG_OPTIONS
    return Launch(plan).run()


def say(text: str, speaker: str = "launch: ") -> None:
    """Prints a line of the launcher's own. A terminal that is gone must not end a run."""
    try:
        print(f"{speaker}{text}", file=sys.stderr, flush=True)
    except OSError:
        pass


# --- The command line ---


@dataclasses.dataclass
class Plan:
    """What the command line asks for, checked."""

    command: list[str]  # of this launcher, to be given again in order to continue
    module: str
    arguments: list[str]  # of the module, always with --run-dir
    workers_per_host: int
    parameter_servers: int
    hosts: list[str]
    rank: int  # of this host
    base_port: int | None  # None: free ports are found
    max_restarts: int
    start_timeout: int  # seconds
    log_dir: pathlib.Path
    gpus: list[str]  # visible on this host


def make_parser() -> argparse.ArgumentParser:
    """The parser of what stands before `-m MODULE`. Numbers are checked later, all at once."""
    parser = argparse.ArgumentParser(
        prog="python -m distribution.launch",
        usage="python -m distribution.launch [options] -m MODULE [options of the module]",
        description="Start a recipe in several processes, on one machine or on many.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", metavar="P", default="1", help="workers on each host (default 1)")
    add(
        "--ps",
        metavar="K",
        default="0",
        help="parameter servers (default 0: workers train in step). They and the coordinator"
        " ('chief') are processes of their own on the first host",
    )
    add(
        "--hosts",
        metavar="HOST0,HOST1,...",
        help="names or IPv4 addresses of all hosts, the same list and the same P on each; the"
        " first host is the chief's",
    )
    add("--node-rank", metavar="R", help="which of --hosts this one is, from 0")
    add(
        "--base-port",
        metavar="N",
        help="worker i of a host listens at N + i, coordinator and parameter servers follow on the"
        f" first host (default: free ports; {DEFAULT_BASE_PORT} with --hosts)",
    )
    add(
        "--start-timeout",
        metavar="S",
        default="300",
        help="seconds to wait for the other hosts (default 300)",
    )
    add(
        "--max-restarts",
        metavar="X",
        default="0",
        help="how often this launcher starts its processes again after one has died (default 0);"
        " not after exit status 2 or 75. A dead worker beside parameter servers is started alone",
    )
    add(
        "--log-dir",
        metavar="D",
        help="folder of the logs, one per process (default: the run directory)",
    )
    add(
        "-m",
        metavar="MODULE",
        dest="module",
        help="what to run, like python's -m; everything after it goes to the module. Without"
        " --run-dir there, one is named runs/MODULE/DATE-TIME and passed on (with --hosts, each"
        " host names its own: give one on a shared disk if the run is to be continued)",
    )
    return parser


def read_options(argv: list[str]) -> Plan:
    """Reads and checks the command line.

    Args:
        argv: Arguments, without the name of the program.

    Returns:
        The plan.

    Raises:
        SystemExit: With status 2, after a message that names all faults.
    """
    # Split by hand: argparse would take a `--` and abbreviations out of the module's arguments.
    split = argv.index("-m") if "-m" in argv else len(argv)
    module, arguments = (argv[split + 1 : split + 2] or [""])[0], argv[split + 2 :]
    options, unknown = make_parser().parse_known_args(argv[:split])
    faults = [f"{name}: no option of the launcher" for name in unknown]

    def number(name: str, low: int, high: int) -> int:
        text = getattr(options, name)
        if re.fullmatch(r"-?\d{1,9}", text) and low <= int(text) <= high:
            return int(text)
        option = "--" + name.replace("_", "-")
        faults.append(f"{option} {text}: expected a whole number from {low} to {high}")
        return low

    workers = number("nproc_per_node", 1, 1024)
    servers = number("ps", 0, 1024)
    timeout = number("start_timeout", 1, 10**6)
    restarts = number("max_restarts", 0, 10**6)

    hosts, rank, base_port = ["localhost"], 0, None
    if options.base_port is not None:
        base_port = number("base_port", 1024, 65535)
    if options.hosts is not None:
        hosts = options.hosts.split(",")
        base_port = base_port or DEFAULT_BASE_PORT
        faults += check_hosts(hosts)
        if options.node_rank is None:
            faults.append("--hosts needs --node-rank: which of them is this one, from 0?")
        else:
            rank = number("node_rank", 0, len(hosts) - 1)
    elif options.node_rank is not None:
        faults.append("--node-rank needs --hosts")
    if base_port and base_port + count_ports(workers, servers) - 1 > 65535:
        last = base_port + count_ports(workers, servers) - 1
        faults.append(f"ports {base_port} to {last} are needed, and they end at 65535")

    gpus = visible_gpus()
    if 0 < len(gpus) < workers:
        faults.append(
            f"--nproc-per-node {workers}: only {len(gpus)} GPUs are visible on this host"
            " (CUDA_VISIBLE_DEVICES=-1 trains on the CPU)"
        )
    faults += check_environment(module) + check_module(module)
    run_dir = find_run_dir(arguments)
    if run_dir == "":
        faults.append("--run-dir names no folder")
    if not faults and base_port:
        faults += check_ports(hosts, rank, base_port, workers, servers)
    if faults:
        print("\n".join(f"launch: {fault}" for fault in faults), file=sys.stderr)
        raise SystemExit(WRONG_OPTIONS)
    if {"-h", "--help"} & set(arguments):  # asked of the module, and needs one process only
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])

    if run_dir is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = str(pathlib.Path("runs", module.rpartition(".")[2], stamp))
        arguments = [*arguments, "--run-dir", run_dir]
    return Plan(
        command=["python", "-m", "distribution.launch", *argv[:split], "-m", module, *arguments],
        module=module,
        arguments=arguments,
        workers_per_host=workers,
        parameter_servers=servers,
        hosts=hosts,
        rank=rank,
        base_port=base_port,
        max_restarts=restarts,
        start_timeout=timeout,
        log_dir=pathlib.Path(options.log_dir or run_dir),
        gpus=gpus,
    )


def check_hosts(hosts: list[str]) -> list[str]:
    """Faults of the list of hosts."""
    faults = []
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*", host):
            faults.append(f"--hosts: {host!r} is no host name or IPv4 address (without a port)")
        elif hosts.count(host) > 1:
            faults.append(f"--hosts: {host} stands there twice (--nproc-per-node starts more)")
    return list(dict.fromkeys(faults))


def check_environment(module: str) -> list[str]:
    """Faults of an environment in which somebody else has started the processes already."""
    alone = f"python -m {module or 'MODULE'} ..."
    if os.environ.get("TF_CONFIG"):
        return [f"TF_CONFIG is set already; start the recipe without the launcher: {alone}"]
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    if tasks != "1":
        return [f"SLURM runs {tasks} tasks; start the recipe without the launcher: srun {alone}"]
    return []


def check_module(module: str) -> list[str]:
    """Faults of the module's name. Imports the packages above the module, not the module."""
    if not module:
        return ["-m MODULE is missing: what is to run? (for example -m recipes.bert_mlm)"]
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(module + ".__main__")
    except (ImportError, ValueError, AttributeError):
        spec = None
    return [] if spec else [f"-m {module}: no such module (looked from {os.getcwd()})"]


def check_ports(
    hosts: list[str], rank: int, base_port: int, workers: int, servers: int
) -> list[str]:
    """Fixed ports on this host that somebody listens at.

    TensorFlow would not notice: it shares its ports, and two runs would talk to each other.
    """
    faults = []
    for port in range(base_port, base_port + count_ports(workers, servers if rank == 0 else 0)):
        if not can_listen(hosts[rank], port):
            faults.append(
                f"{hosts[rank]}:{port} is taken: is another run using this --base-port {base_port}?"
            )
    return faults


def find_run_dir(arguments: list[str]) -> str | None:
    """The value of `--run-dir` among the module's arguments; the last one counts."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--run-dir", "--run_dir"):
            found = value if equals else (arguments[position + 1 : position + 2] or [""])[0]
    return found


# --- Ports, tasks, GPUs ---


def count_ports(workers: int, servers: int) -> int:
    """Ports that a host needs: its workers', and the coordinator's beside parameter servers."""
    return workers + (servers + 1 if servers else 0)


def can_listen(host: str, port: int) -> bool:
    """Whether nobody listens there. An address that is not of this machine counts as free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections are no harm
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def find_free_ports(count: int) -> list[int]:
    """Different ports at which nobody listens, on any address of this machine."""
    candidates = random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS))
    free = []
    while len(free) < count and candidates:
        port = candidates.pop()
        if can_listen("", port):
            free.append(port)
    if len(free) < count:
        raise OSError(f"{count} ports are needed, {len(free)} are free")
    return free


def lay_out(plan: Plan) -> tuple[dict[str, list[str]], list[tuple[str, int]]]:
    """Names every task of the cluster.

    Args:
        plan: What was asked for.

    Returns:
        The cluster as `TF_CONFIG` has it (a list of HOST:PORT per task type), and the tasks of
        this host as pairs of type and index.
    """
    workers, servers = plan.workers_per_host, plan.parameter_servers
    needed = count_ports(workers, servers)
    if plan.base_port is None:
        ports = find_free_ports(needed)
    else:
        ports = list(range(plan.base_port, plan.base_port + needed))
    cluster = {"worker": [f"{host}:{port}" for host in plan.hosts for port in ports[:workers]]}
    tasks = [("worker", plan.rank * workers + i) for i in range(workers)]
    if servers:
        cluster["chief"] = [f"{plan.hosts[0]}:{ports[workers]}"]
        cluster["ps"] = [f"{plan.hosts[0]}:{port}" for port in ports[workers + 1 :]]
        if plan.rank == 0:
            tasks = [("ps", i) for i in range(servers)] + tasks + [("chief", 0)]
    return cluster, tasks


def visible_gpus() -> list[str]:
    """Names of the GPUs that TensorFlow would see, as CUDA_VISIBLE_DEVICES writes them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        hidden = [i for i, name in enumerate(names) if name in ("", "-1")]
        return names[: hidden[0]] if hidden else names  # CUDA stops at the first invalid one
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE)


def deal_gpus(plan: Plan, task: str, index: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES of a task; None leaves the environment as it is.

    All workers get equally many (collectives need that), so some may be left over. Parameter
    servers and the coordinator get none: TensorFlow would claim the memory of every GPU it sees.
    """
    if task != "worker":
        return "-1"
    if not plan.gpus:
        return None
    each = len(plan.gpus) // plan.workers_per_host
    first = index % plan.workers_per_host * each
    return ",".join(plan.gpus[first : first + each])


# --- The processes ---


@dataclasses.dataclass
class Child:
    """A process of the run."""

    task: str
    index: int
    process: subprocess.Popen
    log: pathlib.Path
    log_start: int  # where this process's part of the log begins, in bytes
    swept: bool = False  # nothing of its session is left
    noticed: bool = False  # its end has been dealt with

    @property
    def name(self) -> str:
        """Its rank, for messages."""
        return "chief" if self.task == "chief" else f"{self.task} {self.index}"

    @property
    def alive(self) -> bool:
        """Whether it still runs. Sweeps up what a process that has ended left in its session."""
        if self.process.poll() is None:
            return True
        if not self.swept:
            self.swept = True
            self.kill()
        return False

    @property
    def status(self) -> int:
        """Exit status as a shell gives it: 128 + n after signal n. Only once it has ended."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def describe_end(self) -> str:
        """How it ended, for messages."""
        code = self.process.returncode
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit status {code}"

    def kill(self) -> None:
        """SIGKILL to the whole session of the process."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def last_lines(self) -> list[str]:
        """The end of what it wrote."""
        try:
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_start, size - 65536))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return [f"(not readable: {error.strerror})"]
        return text.splitlines()[-TAIL_LINES:]


def likely_cause(child: Child) -> tuple[bool, bool]:
    """Order of processes that ended at the same time: who failed first?

    A signal from outside follows nobody's failure, and neither do wrong options and a request to
    stop. Any other failure may be a lost connection to one of those.
    """
    code = child.process.returncode
    return code >= 0, code not in (WRONG_OPTIONS, SAVED_AND_STOPPED)


def die_with_the_launcher() -> Callable[[], None] | None:
    """What a child does before it starts, so that it ends when the launcher is killed (Linux)."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_for_death() -> None:
        prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_for_death


def start(plan: Plan, cluster: dict[str, list[str]], task: str, index: int) -> Child:
    """Starts a process of the run; it writes into its own log, after what stands there."""
    config = {"cluster": cluster, "task": {"type": task, "index": index}}
    environment = os.environ | {
        "TF_CONFIG": json.dumps(config),
        "PYTHONUNBUFFERED": "1",
        "KERAS_RECIPES_LAUNCHED": "1",
    }
    gpus = deal_gpus(plan, task, index)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    log = plan.log_dir / ("chief.log" if task == "chief" else f"{task}-{index}.log")
    with open(log, "ab") as file:
        log_start = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", plan.module, *plan.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C reaches the launcher only
            preexec_fn=die_with_the_launcher(),
        )
    return Child(task, index, process, log, log_start)


class Relay(threading.Thread):
    """Copies a log to the terminal as it grows, whole lines at a time.

    The process writes into its log and never waits for the terminal; this thread may.
    """

    def __init__(self, child: Child):
        super().__init__(daemon=True)
        self.log, self.position = child.log, child.log_start
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Copies until `finish`."""
        last = False
        while not last:
            last = self.ended.wait(POLL_SECONDS)
            try:
                self.copy(last)
            except OSError:  # nobody reads any more; the log has it all
                return

    def copy(self, last: bool) -> None:
        """Copies what is new, up to the end of its last line, or all of it."""
        with open(self.log, "rb") as file:
            file.seek(self.position)
            text = file.read()
        if not last:  # progress bars end their lines with a carriage return
            text = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
        self.position += len(text)
        while text:
            text = text[os.write(1, text) :]

    def finish(self) -> None:
        """Copies the rest, and ends."""
        self.ended.set()
        self.join(timeout=5)


class Peers(threading.Thread):
    """Looks whether the tasks on other hosts answer, by connecting to them and hanging up.

    Args:
        addresses: HOST:PORT of every server on another host.
        watched: One of them that is asked again and again, or None.
    """

    def __init__(self, addresses: Iterable[str], watched: str | None):
        super().__init__(daemon=True)
        self.silent = dict.fromkeys(addresses, "not asked yet")
        self.watched = watched
        self.started = time.monotonic()
        self.last_answer: float | None = None  # of the one that is watched
        self.closed = threading.Event()
        self.start()

    def run(self) -> None:
        """Asks until all have answered, or for ever if one is watched."""
        while (self.silent or self.watched) and not self.closed.wait(0.5):
            dead_hosts = set()  # one look at each per round: a filtered port costs two seconds
            for address in list(self.silent):
                host = address.rpartition(":")[0]
                if host in dead_hosts:
                    continue
                fault = self.ask(address)
                if fault is None:
                    del self.silent[address]
                else:
                    self.silent[address] = fault
                    dead_hosts.add(host)
            if self.watched and self.watched not in self.silent and not self.ask(self.watched):
                self.last_answer = time.monotonic()
            if not self.silent:
                self.closed.wait(WATCH_SECONDS)

    @staticmethod
    def ask(address: str) -> str | None:
        """Why nobody answers there; None if somebody does."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def late(self, timeout: float) -> str | None:
        """Who has not answered after so many seconds; None if all have, or there is time left."""
        if not self.silent or time.monotonic() - self.started < timeout:
            return None
        return self.describe()

    def describe(self) -> str:
        """Those who have not answered, and why."""
        return ", ".join(f"{address} ({fault})" for address, fault in self.silent.copy().items())

    def gone(self) -> bool:
        """Whether the one that is watched has answered once, and then not for a long time."""
        return self.last_answer is not None and (time.monotonic() - self.last_answer > GONE_SECONDS)


class Launch:
    """A run from its first process to its last."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.children: list[Child] = []
        self.restarts = 0
        self.final = False  # nothing is started again
        self.request: int | None = None  # the first signal that reached the launcher
        self.request_time = 0.0
        self.passed_on = False
        self.killed_by: int | None = None  # the second one

    def run(self) -> int:
        """Starts the processes, again if need be, and returns the exit status."""
        plan = self.plan
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.take_signal)
        servers = f", parameter servers: {plan.parameter_servers}" if plan.parameter_servers else ""
        host = f", host {plan.rank} of {len(plan.hosts)}" if len(plan.hosts) > 1 else ""
        workers = plan.workers_per_host * len(plan.hosts)
        say(f"workers: {workers}{servers}{host}; logs in {plan.log_dir}")
        unused = len(plan.gpus) % plan.workers_per_host
        if unused:
            say(f"{unused} of {len(plan.gpus)} GPUs stay idle: all workers get equally many")
        while True:
            try:
                status = self.run_once()
            except OSError as error:  # no port, no process or no log file
                say(f"cannot start the processes: {error}")
                return 1
            if status == SAVED_AND_STOPPED:
                say(f"saved and stopped; this continues:\n  {shlex.join(plan.command)}")
            if status in (0, WRONG_OPTIONS, SAVED_AND_STOPPED) or self.final or self.request:
                return status
            if self.restarts >= plan.max_restarts:
                return status
            self.restarts += 1
            say(f"starting all processes again, restart {self.restarts} of {plan.max_restarts}")

    def take_signal(self, number: int, frame: object) -> None:
        """Notes a request to stop (the handler of signals); the loops act on it."""
        now = time.monotonic()
        if self.request is None:
            self.request, self.request_time = number, now
        elif now - self.request_time > SAME_REQUEST_SECONDS:
            self.killed_by = number

    def run_once(self) -> int:
        """Starts every process of this host, waits for the end, leaves none behind."""
        plan = self.plan
        cluster, tasks = lay_out(plan)
        mine = {cluster[task][index] for task, index in tasks}
        # The coordinator is not asked: it calls others and may never listen.
        others = [a for task in ("worker", "ps") for a in cluster.get(task, []) if a not in mine]
        away = bool(plan.parameter_servers) and plan.rank > 0
        self.children = []
        relay = peers = None
        try:
            for task, index in tasks:
                self.children.append(start(plan, cluster, task, index))
            shown = self.chief or next(c for c in self.children if c.task == "worker")
            relay = Relay(shown)
            peers = Peers(others, cluster["ps"][0] if away else None)
            return self.supervise(cluster, peers)
        finally:
            self.stop(STOP_SECONDS)
            if peers:
                peers.closed.set()
            if relay:
                relay.finish()

    @property
    def chief(self) -> Child | None:
        """The coordinator, if there is one on this host."""
        return next((child for child in self.children if child.task == "chief"), None)

    def supervise(self, cluster: dict[str, list[str]], peers: Peers) -> int:
        """Waits until the run is over, one way or another.

        Args:
            cluster: The cluster, for a worker that is started again.
            peers: What is known of the other hosts.

        Returns:
            The exit status. Some processes may still run.
        """
        failed: Child | None = None
        deadline = float("inf")
        while True:
            ended = [c for c in self.children if not c.noticed and not c.alive]
            for child in sorted(ended, key=likely_cause):
                child.noticed = True
                if child.status == 0 or failed or self.survive(child, cluster):
                    continue
                failed = child
                self.report(child, peers)
                wait = child.status == SAVED_AND_STOPPED or self.request
                deadline = time.monotonic() + (SAVE_SECONDS if wait else 0)
            chief = self.chief
            if chief and chief.noticed:
                self.stop(SERVER_STOP_SECONDS)
                return failed.status if failed and chief.status else 0
            if failed and (self.plan.parameter_servers or time.monotonic() >= deadline):
                return failed.status
            if all(child.noticed for child in self.children):
                return failed.status if failed else 0
            if self.killed_by:
                say("killing the processes")
                self.final = True
                return failed.status if failed else 128 + self.killed_by
            if self.request and not self.pass_on(self.request):
                return 128 + self.request
            late = peers.late(self.plan.start_timeout)
            if late:
                say(
                    f"no answer within {self.plan.start_timeout} s from {late}; does the launcher"
                    " run there, with the same --hosts, --nproc-per-node and --base-port?"
                )
                self.final = True
                return 1
            if peers.gone():
                say(f"{peers.watched} does not answer any more: the run is over, see its launcher")
                return 0
            time.sleep(POLL_SECONDS)

    def pass_on(self, request: int) -> bool:
        """Asks the processes to save and stop, once.

        Parameter servers and their workers have nothing to save, and without them the
        coordinator cannot: it alone is asked.

        Args:
            request: The number of the signal.

        Returns:
            Whether there is something to wait for.
        """
        if self.plan.parameter_servers and not self.chief:
            return False
        if not self.passed_on:
            self.passed_on = True
            say(f"{signal.Signals(request).name}: asking the processes to stop; again kills them")
            number = signal.SIGTERM if request == signal.SIGHUP else request
            for child in [self.chief] if self.chief else self.children:
                child.process.send_signal(number)
        return True

    def survive(self, child: Child, cluster: dict[str, list[str]]) -> bool:
        """Whether a run with parameter servers goes on after the death of a worker.

        The worker is started again at its port while there are restarts left. Without any worker
        the coordinator would wait for ever; on a first host, others may have some.
        """
        if not self.plan.parameter_servers or child.task != "worker":
            return False
        if child.status == WRONG_OPTIONS:
            return False
        if self.request:
            return True
        again = self.restarts < self.plan.max_restarts
        others = any(c.task == "worker" and c.alive for c in self.children)
        if not again and not others and (len(self.plan.hosts) == 1 or not self.chief):
            return False
        self.print_tail(child)
        if again:
            self.restarts += 1
            say(
                f"the run goes on, {child.name} is started again,"
                f" restart {self.restarts} of {self.plan.max_restarts}"
            )
            self.children.remove(child)
            self.children.append(start(self.plan, cluster, child.task, child.index))
        else:
            say(f"the run goes on without {child.name}")
        return True

    def report(self, child: Child, peers: Peers) -> None:
        """Says which process failed first, and shows its last lines."""
        if child.status == SAVED_AND_STOPPED or self.request:
            say(child.describe_end())
            return
        self.print_tail(child)
        if peers.silent:
            say(f"not answered so far: {peers.describe()}")

    def print_tail(self, child: Child) -> None:
        """Prints how a process ended and its last lines, each with its rank."""
        say(f"{child.describe_end()}; the end of {child.log}:")
        for line in child.last_lines():
            say(line, speaker=f"[{child.name}] ")

    def stop(self, seconds: float) -> None:
        """Ends what still runs: SIGTERM, then SIGKILL to whole sessions.

        Args:
            seconds: Time between the two. A second request to stop cuts it short.
        """
        for child in self.children:
            if child.alive and not self.killed_by:
                child.process.terminate()
        end = time.monotonic() + seconds
        while any(c.alive for c in self.children) and time.monotonic() < end:
            if self.killed_by:
                break
            time.sleep(POLL_SECONDS / 4)
        for child in self.children:
            if child.alive:
                child.kill()
                child.process.wait()


if __name__ == "__main__":
    sys.exit(main())
