"""Several launchers on loopback agree on who trains (`--min-hosts`). No TensorFlow in here."""

import json
import signal
import socket
import threading
import time

import pytest

from distribution.launch import following, hosts, leading, links, progress
from distribution.launch.hosts import FewerHosts
from distribution.launch.lead import LeadLock
from distribution.launch.leading import Leading
from distribution.launch.members import Wish
from distribution.launch.plan import SAVED_AND_STOPPED, WRONG_OPTIONS, LaunchPlan
from tests.support.launched import find_ports


class Hosts:
    """The launchers of some hosts, all in this process."""

    def __init__(self, folder, count):
        self.folder = folder
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.addresses = [s.getsockname() for s in sockets]
        for held in sockets:
            held.close()
        self.members: dict[int, FewerHosts] = {}
        self.stopped: set[int] = set()
        self.steps = 0

    def come(self, *ranks, min_hosts=1, **plan):
        for rank in ranks:
            everything = dict(
                command=[],
                module="fake",
                arguments=[],
                workers_per_host=1,
                parameter_servers=0,
                hosts=[f"host{i}" for i in range(len(self.addresses))],
                rank=rank,
                base_port=1000,
                max_restarts=None,
                start_timeout=20,
                log_dir=self.folder,
                gpus=[],
                cores=[],
                run_dir=self.folder / "run",
                min_hosts=min_hosts,
                host_timeout=20,
            )
            made = FewerHosts(LaunchPlan(**(everything | plan)), self.addresses)
            self.members[rank] = made

    def go_away(self, rank, politely=True):
        made = self.members.pop(rank)
        if not politely:  # as by a power cut: nobody hangs up
            for link in self.links_of(made):
                link.send = lambda message: None
        made.close()

    @staticmethod
    def links_of(made):
        role = made.role
        return role.others.values() if isinstance(role, Leading) else [role.link]

    def gather(self, *ranks, found=None):
        """What each of them returns: hosts and own place, or an exit status."""
        found = {} if found is None else found

        def one(rank):
            plan = self.members[rank].gather(lambda: rank in self.stopped)
            found[rank] = plan if isinstance(plan, int) else (plan.hosts, plan.rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    def after(self, statuses, asked=(), final=False):
        """The end of a start on each of these hosts; what each launcher does then."""
        found = {}

        def one(rank, status):
            found[rank] = self.members[rank].after(status, rank in asked, final)

        threads = [threading.Thread(target=one, args=item) for item in statuses.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    def checkpoint(self):
        self.steps += 10
        path = self.folder / "run" / "checkpoints" / f"step-{self.steps:08d}"
        path.mkdir(parents=True)

    def wish_of(self, rank, wish, seconds=5.0):
        """Whether a launcher comes to want this."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.members[rank].look() is wish:
                return True
            time.sleep(0.02)
        return False

    @property
    def leader(self):
        return next(r for r, made in self.members.items() if isinstance(made.role, Leading))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module, name, seconds in (
        (links, "BEAT_SECONDS", 0.1),
        (links, "SILENT_SECONDS", 1.0),
        (leading, "OTHERS_SECONDS", 2.0),
        (leading, "LEAVE_SECONDS", 0.3),
        (leading, "ASK_SECONDS", 0.3),
        (hosts, "AGAIN_SECONDS", 0.1),
        (hosts, "ASIDE_SECONDS", 1.0),
        (hosts, "POLL_SECONDS", 0.02),
        (leading, "POLL_SECONDS", 0.02),
        (progress, "LOOK_SECONDS", 0.0),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def made(tmp_path):
    opened = []

    def make(count):
        opened.append(Hosts(tmp_path, count))
        return opened[-1]

    yield make
    for each in opened:
        for members in each.members.values():
            members.close()


def assert_trains(found, names):
    """All of these hosts train, each at its place."""
    names = [f"host{rank}" for rank in names]
    assert {rank: sorted(place[0]) for rank, place in found.items()} == dict.fromkeys(
        found, sorted(names)
    )
    assert {place[0][place[1]] for place in found.values()} == {f"host{r}" for r in found}
    assert len({tuple(place[0]) for place in found.values()}) == 1


def test_all_come_and_the_leader_has_the_chief(made):
    these = made(3)
    these.come(2, 0, 1)
    found = these.gather(0, 1, 2)
    assert_trains(found, [0, 1, 2])
    assert found[these.leader][1] == 0
    assert these.after(dict.fromkeys(range(3), 0)) == {these.leader: 0} | {
        rank: None for rank in range(3) if rank != these.leader
    }
    followers = [rank for rank in range(3) if rank != these.leader]
    assert these.gather(*followers) == dict.fromkeys(followers, 0)


def test_one_is_gone_and_comes_back_at_the_next_checkpoint(made):
    these = made(3)
    these.come(0, 1, 2, host_timeout=1)
    these.gather(0, 1, 2)
    gone = next(rank for rank in range(3) if rank != these.leader)
    left = [rank for rank in range(3) if rank != gone]
    these.go_away(gone)
    assert these.wish_of(these.leader, Wish.END)
    assert these.after(dict.fromkeys(left, 1)) == dict.fromkeys(left)
    assert_trains(these.gather(*left), left)
    these.come(gone, host_timeout=1)
    back = threading.Thread(target=lambda: again.update(these.gather(gone)))
    again = {}
    back.start()
    assert not these.wish_of(these.leader, Wish.SAVE, seconds=0.7)
    these.checkpoint()
    assert these.wish_of(these.leader, Wish.SAVE)
    assert these.after(dict.fromkeys(left, SAVED_AND_STOPPED)) == dict.fromkeys(left)
    found = these.gather(*left)
    back.join(10)
    assert_trains(found | again, [0, 1, 2])


def test_the_leader_is_gone_and_another_one_leads(made):
    these = made(3)
    these.come(0, 1, 2, host_timeout=1)
    these.gather(0, 1, 2)
    first = these.leader
    left = [rank for rank in range(3) if rank != first]
    these.go_away(first, politely=False)
    for rank in left:
        assert these.wish_of(rank, Wish.END)
    assert these.after(dict.fromkeys(left, 1)) == dict.fromkeys(left)
    found = these.gather(*left)
    assert_trains(found, left)
    assert found[these.leader][1] == 0


def test_too_few_do_not_start(made, capsys):
    these = made(3)
    these.come(1, min_hosts=2, host_timeout=0, start_timeout=1)
    assert these.gather(1) == {1: 1}
    assert "no start within 1 s: 1 of 3 hosts are too few" in capsys.readouterr().err


def test_nobody_starts_alone_before_the_lock_was_seen_to_hold(made):
    these = made(2)
    these.come(0, host_timeout=0, start_timeout=1)
    assert these.gather(0) == {0: 1}
    these.go_away(0)
    these.come(0, 1)
    assert_trains(these.gather(0, 1), [0, 1])
    last = these.leader
    these.go_away(1 - last)
    these.after({last: 1})
    these.go_away(last)
    these.come(1 - last, host_timeout=0)  # either of them may now
    assert_trains(these.gather(1 - last), [1 - last])


def test_a_lock_that_holds_on_one_host_only_is_refused(made, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", lambda *arguments: None)
    these = made(2)
    these.come(0, 1)
    found = these.gather(0, 1)
    assert WRONG_OPTIONS in found.values() and not any(isinstance(f, tuple) for f in found.values())
    assert "holds this lock, too" in capsys.readouterr().err


def test_a_host_whose_lock_was_taken_over_leads_no_more(made, capsys):
    these = made(2)
    these.come(0, 1)
    these.gather(0, 1)
    first = these.leader
    path = these.folder / "run" / ".launch.lock"
    these.go_away(1 - first)
    # As by a file server that has not heard of the host for a while.
    path.write_text(json.dumps({"rank": 1 - first, "proven": [0, 1]}))
    assert not these.members[first].lock.is_mine
    these.members[first].plan.host_timeout = 0
    these.after({first: 1})
    capsys.readouterr()
    assert_trains(these.gather(first), [first])  # nobody else has it in truth: after a while
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "launch: 1 of 2 hosts are too few"
    assert said[1] == f"launch: host {first} leads, and waits for the others"


def test_a_failure_with_all_here_is_tried_once_more(made, capsys):
    these = made(2)
    these.come(0, 1)
    for turn in range(2):
        assert_trains(these.gather(0, 1), [0, 1])
        follower = 1 - these.leader
        found = these.after({these.leader: 1, follower: 3})
        assert found[follower] is None
        assert found[these.leader] == (1 if turn else None)
    assert these.gather(follower) == {follower: 1}
    assert "failed again without a checkpoint between" in capsys.readouterr().err


def test_wrong_options_on_one_host_end_the_run(made):
    these = made(2)
    these.come(0, 1)
    these.gather(0, 1)
    follower = 1 - these.leader
    assert these.after({these.leader: 1, follower: 2}) == {these.leader: 2, follower: None}
    assert these.gather(follower) == {follower: 2}


@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_request_to_stop_stops_all(made, who):
    these = made(2)
    these.come(0, 1)
    these.gather(0, 1)
    follower = 1 - these.leader
    asked = these.leader if who == "leader" else follower
    found = these.after({0: 75, 1: 75}, asked={asked})
    assert found[these.leader] == 75
    if who == "leader":
        assert these.gather(follower) == {follower: 75}
    else:
        assert found[follower] == 75


@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_request_between_two_starts_stops_all(made, who):
    these = made(3)
    these.come(0, 1)  # they wait for the third one
    threading.Timer(1.0, lambda: these.stopped.add(asked)).start()
    asked = 0
    found = {}
    thread = threading.Thread(target=lambda: found.update(these.gather(0, 1)))
    thread.start()
    time.sleep(0.5)
    asked = these.leader if who == "leader" else 1 - these.leader
    thread.join(20)
    assert found == {0: 75, 1: 75}


def test_a_host_that_was_started_otherwise_is_refused(made, capsys):
    these = made(2)
    these.come(0, start_timeout=1)
    these.come(1, workers_per_host=2, start_timeout=1)
    assert these.gather(0, 1) == {0: 1, 1: 1}
    assert "started with other hosts, workers or another module" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"hello": 7}\n', b"x" * 70000, b'{"start": 1}\n'],
)
def test_strangers_do_no_harm(made, said):
    these = made(2)
    these.come(0)
    found = {}
    thread = threading.Thread(target=lambda: found.update(these.gather(0)))
    thread.start()
    time.sleep(0.3)
    with socket.create_connection(these.addresses[0]) as stranger:
        stranger.sendall(said)
        stranger.settimeout(5)
        with pytest.raises((ConnectionError, StopIteration)):
            while stranger.recv(1000):
                pass
            raise StopIteration
    these.come(1)
    assert_trains(these.gather(1), [0, 1])
    thread.join(10)
    assert_trains(found, [0, 1])


def test_only_hosts_that_can_share_the_batch_train(made):
    these = made(3)
    (these.folder / "run").mkdir()
    facts = {"resolved": {"global_batch_size": 32}, "replicas_per_worker": 1}
    (these.folder / "run" / "options.json").write_text(json.dumps(facts))
    these.come(0, 1, 2)
    found = {}
    thread = threading.Thread(target=these.gather, args=(0, 1, 2), kwargs={"found": found})
    thread.start()
    thread.join(1)
    assert len(found) == 2 and {len(place[0]) for place in found.values()} == {2}
    idle = next(rank for rank in range(3) if rank not in found)
    these.after({rank: 0 for rank in found})
    thread.join(10)
    assert found[idle] == 0


def test_the_lock(tmp_path):
    one, other = LeadLock(tmp_path, 0), LeadLock(tmp_path, 1)
    assert one.take() and one.take() and not other.take()
    assert other.holder() == 0 and one.is_mine and not other.is_mine
    assert not one.is_proven
    one.was_seen_by(1)
    assert one.is_proven and other.is_proven
    one.release()
    assert other.take() and other.holder() == 1 and other.is_proven
    other.release()


def test_a_link_that_is_silent_is_lost():
    server = socket.create_server(("127.0.0.1", 0))
    link = links.dial(*server.getsockname())
    held, _ = server.accept()
    began = time.monotonic()
    while not link.lost and time.monotonic() - began < 60:
        time.sleep(0.02)
    assert link.lost == "silent for 1 s"
    assert time.monotonic() - began > 0.9
    held.close()
    server.close()


def test_the_word_of_the_leader_is_heard_before_it_hangs_up():
    ours, theirs = socket.socketpair()
    link = links.Link(ours)
    theirs.sendall(b'{"leave": 0}\n')
    theirs.close()
    while not link.lost:
        time.sleep(0.02)
    follower = following.Following(link, 1)
    assert follower.lost is None
    assert follower.gather() == 0


# --- Whole launchers, with small programs in place of recipes ---

WORKS_UNTIL_DONE = """
if task == "worker" and len(config["cluster"]["worker"]) > 1:
    server = listen()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
host = config["cluster"]["worker"][index].split(":")[0]
name = f"{host}-of-{len(config['cluster']['worker'])}"
turn = len(list(here.glob(f"{name}.*.json")))
ready()
while not (here / "done").exists():
    time.sleep(0.02)
"""


def test_a_host_is_killed_and_its_launcher_started_again(runs):
    base = find_ports(2)
    options = ["--hosts=127.0.0.1,127.0.0.2", "--min-hosts=1", "--host-timeout=2"]
    options += [f"--base-port={base}"]
    arguments = ["--run-dir", str(runs.folder / "r")]

    def start(rank):
        more = (f"--node-rank={rank}", f"--log-dir=logs-{rank}")
        return runs.start(WORKS_UNTIL_DONE, *options, *more, arguments=arguments)

    first = start(0)
    end = time.monotonic() + 20
    while not (runs.folder / "r" / ".launch.lock").exists() and time.monotonic() < end:
        time.sleep(0.02)
    second = start(1)
    runs.wait_for("127.0.0.1-of-2.0.json", "127.0.0.2-of-2.0.json")
    second.kill()
    second.communicate()
    runs.wait_for("127.0.0.1-of-1.0.json")
    second = start(1)
    time.sleep(1.0)
    (runs.folder / "r" / "checkpoints" / "step-00000001").mkdir(parents=True)
    runs.wait_for("127.0.0.1-of-2.1.json", "127.0.0.2-of-2.1.json")
    (runs.notes / "done").touch()
    ends = [runs.end(process) for process in (first, second)]
    assert [status for status, *_ in ends] == [0, 0], ends
    said = ends[0][2]
    order = [
        "workers: 1 to 2, host 0 of 2",
        "2 of 2 hosts train",
        "away: host 1 (127.0.0.2) (it hung up)",
        "1 of 2 hosts train: host 0 (127.0.0.1)",
        "saving, to start again with host 1 (127.0.0.2)",
        "2 of 2 hosts train",
    ]
    for words in order:
        assert words in said, f"{words}\n{ends[0][2]}\n{ends[1][2]}"
        said = said[said.index(words) + len(words) :]
    assert "Resume with" not in ends[0][2] + ends[1][2]
    config = runs.note("127.0.0.1-of-1.0")["config"]
    assert config["cluster"] == {"worker": [f"127.0.0.1:{base}"]}


def test_ctrl_c_on_one_host_stops_both(runs):
    base = find_ports(2)
    options = ["--hosts=127.0.0.1,127.0.0.2", "--min-hosts=2", f"--base-port={base}"]
    arguments = ["--run-dir", str(runs.folder / "r")]
    code = WORKS_UNTIL_DONE.replace(
        "lambda *_: sys.exit(75)", "lambda *_: ((here / 'done').touch(), sys.exit(75))"
    ).replace("time.sleep(0.02)\n", "time.sleep(0.02)\n\nsys.exit(75)")
    both = [
        runs.start(code, *options, f"--node-rank={r}", f"--log-dir=logs-{r}", arguments=arguments)
        for r in range(2)
    ]
    runs.wait_for("127.0.0.1-of-2.0.json", "127.0.0.2-of-2.0.json")
    both[1].send_signal(signal.SIGTERM)
    ends = [runs.end(process) for process in both]
    assert [status for status, *_ in ends] == [75, 75], ends
    assert all("Resume with" in err for *_, err in ends)
