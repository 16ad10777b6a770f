"""The ranks of a job find each other, exchange small messages, and notice if one dies or hangs.

Rank 0 listens, and the other ranks connect to it over TCP. They learn its address and the job's
token from the environment, or from a file that only their user can read. When all ranks are there,
rank 0 stops listening. The connections carry small messages, each a length in 4 bytes and then
JSON, and signs of life. The job ends on all ranks if a rank's connection ends, if it gives no sign
of life, or if it does not come to where the others wait. (cupyx.distributed has a store for ranks
to meet at, but beside a dead rank its barrier waits for ever, and it needs CuPy.)
"""
import contextlib
import hashlib
import hmac
import json
import os
import re
import resource
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from dev.common.cache import cache_folder
from train_gpt2 import UserError, replace_file

HERE = str(Path(__file__).resolve().parents[3])
BEAT = 1.0  # seconds between signs of life
SILENCE = 20.0  # seconds without one, or without a step, after which a rank counts as hung
FIRST = 600.0  # seconds for all ranks to connect their devices, and for each of the first steps
LONG = 3600.0  # seconds to wait for a rank that may compile, evaluate or write
ADMISSION = 5.0  # seconds for a connection to prove that it knows the token
JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
       "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")  # tell a user's jobs apart


def first_host(nodes):
    """The first host in a list of Slurm's, such as "gpu[03-05,9],login1"; or ""."""
    first = re.match(r"([^,\[]|\[[^]]*\])*", nodes)[0]
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first)


def number_from(name, default):
    """A number from the environment. Raises UserError."""
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) > 65535:
        raise UserError(f"{name} is {text}: expected a whole number up to 65535")
    return int(text)


def allow_files():
    """Allow this process as many open files as the system lets it; shells often allow 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # a system may not allow it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Point:
    """Where the ranks of this job meet: host, port and token. They come from the environment if it
    has all three. Otherwise rank 0 chooses them and writes them to a file in a folder that all
    ranks see: -o, or the cache."""

    def __init__(self, ranks_here, count, output):
        environment, job = os.environ, [os.environ.get(name, "") for name in JOB]
        self.here, self.path = ranks_here == count, None  # here: all ranks are on this machine
        self.host = (environment.get("MASTER_ADDR")
                     or first_host(environment.get("SLURM_STEP_NODELIST", "")))
        self.host = "127.0.0.1" if self.here else self.host
        beside = number_from("MASTER_PORT", 0) + 1  # torchrun itself listens on that port
        self.port = number_from("TRAIN_GPT2_PORT", beside)
        self.token = environment.get("TRAIN_GPT2_TOKEN")
        if not (self.host and self.port > 1 and self.token):
            job = hashlib.sha256(repr(job).encode()).hexdigest()[:12]
            self.path = Path(output or cache_folder()) / f"ranks_{job}"

    def listen(self):
        """A socket that listens there."""
        if self.path:
            self.host, self.port = "127.0.0.1" if self.here else socket.gethostname(), 0
            self.token = self.token or secrets.token_hex(16)
        try:
            host = "127.0.0.1" if self.here else ""
            server = socket.create_server((host, self.port), backlog=1024)
        except OSError as e:
            raise UserError(f"the ranks cannot meet at port {self.port} ({e.strerror}): set "
                            "TRAIN_GPT2_PORT to a free one, the same for all") from None
        if self.path:
            text = f"{self.host} {server.getsockname()[1]} {self.token}"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise UserError(f"-o {self.path.parent}: {e.strerror}; expected a folder to write "
                                "to") from None
            mask = os.umask(0o177)  # the file has mode 0600 from the start
            try:
                replace_file(self.path, [text.encode()])
            finally:
                os.umask(mask)
        return server

    def find(self):
        """(host, port); sets the token too. Raises OSError or ValueError while the file is
        missing."""
        if self.path:
            found = os.stat(self.path)
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ValueError(f"{self.path} can be read or written by others than its owner, "
                                 "this user")
            self.host, port, self.token = self.path.read_text().split()
            self.port = int(port)
        return self.host, self.port

    def __str__(self):
        return f"{self.host}:{self.port}" if not self.path else f"the address in {self.path}"


def sign(token, data):
    """32 bytes that prove knowledge of the token."""
    return hmac.digest(token.encode(), data, "sha256")


def receive(link, count):
    """Exactly `count` bytes. Raises OSError."""
    data = b""
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


def where():
    """The line of this program's files that the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame and not frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "its end"


class Meeting:
    """A rank's connections. The constructor returns when all ranks are there, or raises UserError
    with the ranks that are missing."""

    def __init__(self, rank, count, ranks_here, output):
        self.rank, self.count, self.point = rank, count, Point(ranks_here, count, output)
        self.wait = number_from("TRAIN_GPT2_WAIT", 120)  # seconds for all ranks to connect
        self.links, self.posts, self.answers, self.deadline = {}, {}, {}, None
        self.calls, self.longest, self.patience, self.last = 0, 0.0, LONG, 0.0  # see agree
        self.places = {}  # where each main thread was last, to report a hang
        self.sending, self.news = threading.RLock(), threading.Condition(threading.RLock())
        self.leaving, self.failing = threading.Event(), threading.Event()
        self.people = {r: ["a machine", 0, 0] for r in range(count)}
        if rank:
            self.connect()
        else:
            self.admit_all()
        for link in self.links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(SILENCE)
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()
        boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name
        space = ""
        if boot.exists():
            space = f"{boot.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
        own = [socket.gethostname(), os.getpid(), space]
        self.people = dict(enumerate(self.exchange(own, "the start", FIRST)))
        machines = [[host, space] for host, _, space in self.people.values()]
        self.here, self.deadline = machines.count(machines[self.rank]), time.monotonic() + FIRST

    def name(self, rank):
        host, process, _ = self.people[rank]
        return f"rank {rank} on {host}, process {process}"

    # ---- Coming together

    def admit_all(self):
        allow_files()  # each connection needs one
        server, end = self.point.listen(), time.monotonic() + self.wait
        server.settimeout(0.2)
        try:
            while len(self.links) < self.count - 1:
                if time.monotonic() > end:
                    missing = ", ".join(str(r) for r in range(1, self.count) if r not in self.links)
                    reason = (f"rank {missing} of {self.count} has not come to {self.point} in "
                              f"{self.wait:.0f} s: expected all to be started, with the same "
                              "token; TRAIN_GPT2_WAIT is the time")
                    self.send(self.links, "end", reason, [])
                    raise UserError(reason)
                with contextlib.suppress(TimeoutError):
                    link, _ = server.accept()
                    threading.Thread(target=self.admit, args=(link,), daemon=True).start()
        finally:
            server.close()
            if self.point.path:
                self.point.path.unlink(missing_ok=True)

    def admit(self, link):
        """Admit a process if it proves that it knows the token, and is a rank that is still
        missing."""
        try:
            link.settimeout(ADMISSION)
            link.sendall(question := secrets.token_bytes(32))
            numbers, proof = receive(link, 8), receive(link, 32)
            rank, count = struct.unpack("<II", numbers)
            with self.sending:
                knows = hmac.compare_digest(proof, sign(self.point.token, question + numbers))
                good = (knows and count == self.count and 0 < rank < count
                        and rank not in self.links)
                if good:
                    link.sendall(sign(self.point.token, proof))
                    self.links[rank] = link
                    return
        except OSError:
            pass
        link.close()

    def connect(self):
        end = time.monotonic() + self.wait
        while True:
            try:
                link = socket.create_connection(self.point.find(), timeout=ADMISSION)
                numbers, question = struct.pack("<II", self.rank, self.count), receive(link, 32)
                proof = sign(self.point.token, question + numbers)
                link.sendall(numbers + proof)
                if hmac.compare_digest(receive(link, 32), sign(self.point.token, proof)):
                    self.links[0] = link
                    return
                trouble = "another program answers there"
            except (OSError, ValueError) as e:
                trouble = e
            if time.monotonic() > end:
                raise UserError(f"rank {self.rank} of {self.count} has not been let in at "
                                f"{self.point} in {self.wait:.0f} s ({trouble}): expected rank 0 "
                                "to run, with the same token and number of ranks; TRAIN_GPT2_WAIT "
                                "is the time") from None
            time.sleep(0.1)

    # ---- Messages

    def send(self, ranks, *message):
        """Send a message to these ranks. The watcher notices a connection that has ended."""
        data = json.dumps(message).encode()
        for rank in ranks:
            with self.sending, contextlib.suppress(OSError):
                self.links[rank].sendall(struct.pack("<I", len(data)) + data)

    def exchange(self, value, about, patience=LONG):
        """[each rank's value], once all ranks have called this; values are what JSON can hold. A
        rank that does not call it within `patience` seconds ends the job. about: what this
        is, for errors."""
        if about != "the next step":  # something else comes first, which may take that long
            self.patience, self.deadline = LONG, self.deadline and time.monotonic() + 1.25 * LONG
        if self.rank:
            self.send([0], "post", about, value, patience)
        else:
            self.post(0, about, value, patience)
        with self.news:
            while about not in self.answers:
                self.news.wait()
            return self.answers.pop(about)

    def expect_same(self, own):
        """Raise UserError, on all ranks, unless own, {name: value}, is the same on all."""
        everyone = self.exchange(own, "the start")
        for rank, other in enumerate(everyone):
            for what in sorted(everyone[0].keys() | other.keys()):
                if other.get(what) != everyone[0].get(what):
                    raise UserError(f"{self.name(rank)}: {what} is {other.get(what)}, and on rank "
                                    f"0 {everyone[0].get(what)}: expected the same on all ranks")

    def post(self, rank, about, value, patience):
        """On rank 0: take a rank's value. When all have come, send all values to all ranks."""
        with self.news:
            _, _, values = self.posts.setdefault(about, (time.monotonic(), patience, {}))
            values[rank] = value
            if len(values) < self.count:
                return
            del self.posts[about]
            everything = [values[r] for r in range(self.count)]
            # Here first: a rank that gets the answer to "the end" closes its connection
            self.answer(about, everything)
            self.send(self.links, "answer", about, everything)

    def answer(self, about, values):
        if about == "the end":
            self.leaving.set()
        with self.news:
            self.answers[about] = values
            self.news.notify_all()

    def take(self, rank, kind, *message):
        """Handle a message of a rank."""
        if kind == "beat":
            self.places[rank] = message[0]
        elif kind == "post":
            self.post(rank, *message)
        elif kind == "answer":
            self.answer(*message)
        elif kind == "failed" and not self.failing.wait(2):  # rank 0 may be about to say the same
            self.end(f"{self.name(rank)}: {message[0]}")
        elif kind == "end":
            self.obey(*message)

    def agree(self, stop, pauses):
        """Whether a rank has a signal to stop; then all ranks have its number in `stop`. All ranks
        ask before each step. A rank counts as hung if it asks later than another by more than
        max(SILENCE, 3 * the longest step); LONG if something pauses the steps; FIRST for the first
        three steps, which choose algorithms and record graphs."""
        told = self.exchange([stop[:1], bool(pauses)], "the next step", self.patience)
        now, numbers = time.monotonic(), [number for some, _ in told for number in some]
        if self.calls > 3 and self.patience < LONG or self.calls == 3:
            self.longest = max(self.longest, now - self.last)
        self.calls, self.last = self.calls + 1, now
        self.patience = FIRST if self.calls < 4 else max(SILENCE, 3 * self.longest)
        if numbers or any(each for _, each in told):
            self.patience = LONG
        self.deadline = now + 1.25 * self.patience  # if no rank comes; silence is noticed first
        stop += [] if stop else numbers[:1]
        return bool(numbers)  # a signal that has come since counts for the next step

    # ---- The watch

    def watch(self):
        """Read messages, give signs of life, and watch the clock, in a thread, until the job
        ends."""
        selector, data = selectors.DefaultSelector(), dict.fromkeys(self.links, b"")
        for rank, link in self.links.items():
            selector.register(link, selectors.EVENT_READ, rank)
        looked, beat = time.monotonic(), 0.0
        # Rank 0 may still wait for others.
        heard = dict.fromkeys(self.links, looked + (self.wait if self.rank else 0))
        while selector.get_map():
            events, now = selector.select(BEAT), time.monotonic()
            if now - looked > SILENCE / 2:  # this machine itself was asleep
                heard = {rank: max(when, now) for rank, when in heard.items()}
                with self.news:
                    self.deadline = self.deadline and self.deadline + now - looked
                    self.posts = {about: (begun + now - looked, *rest)
                                  for about, (begun, *rest) in self.posts.items()}
            looked = now
            for key, _ in events:
                rank, part = key.data, b""
                with contextlib.suppress(OSError):
                    part = key.fileobj.recv(2**16)
                if not part:
                    selector.unregister(key.fileobj)
                    if not (self.leaving.is_set() or self.failing.is_set()):
                        self.lose(rank, now - heard[rank])
                    continue
                heard[rank], data[rank] = now, data[rank] + part
                while len(data[rank]) >= 4 and len(data[rank]) >= (
                        size := 4 + struct.unpack("<I", data[rank][:4])[0]):
                    message, data[rank] = data[rank][4:size], data[rank][size:]
                    self.take(rank, *json.loads(message))
            if now - beat > BEAT:
                beat = now
                self.places[self.rank] = where()
                self.send(self.links, "beat", self.places[self.rank])
            if beat == now and not self.leaving.is_set():
                for rank, when in heard.items():
                    if now - when > SILENCE:
                        self.lose(rank, now - when)
                if not self.rank:
                    self.look_for_hangs(now)

    def look_for_hangs(self, now):
        """On rank 0, which sees all posts: end the job if a rank does not come to where others
        wait, or if none comes."""
        with self.news:
            for about, (begun, patience, values) in self.posts.items():
                late = [r for r in range(self.count) if r not in values]
                if now - begun > patience:
                    who = " and ".join(map(self.name, late))
                    self.end(f"{who} has not come to {about}, where others have waited for "
                             f"{now - begun:.0f} s", late)
            if self.deadline and now > self.deadline and "the next step" not in self.posts:
                at = {}
                for rank in range(self.count):
                    at.setdefault(self.places.get(rank, "an unknown place"), []).append(str(rank))
                self.end("no rank comes to the next step: " + "; ".join(
                    f"rank {', '.join(ranks)} at {place}" for place, ranks in at.items()))

    def lose(self, rank, silence):
        """End the job because of a rank that is gone or hangs. A hanging one may just have been
        killed by another."""
        if silence > SILENCE / 2:
            self.end(f"{self.name(rank)}, has given no sign of life for {silence:.0f} s", [rank])
        else:
            self.end(f"{self.name(rank)}, is gone: it was killed, or crashed")

    def end(self, reason, hanging=()):
        """End the job on all ranks, and kill those that hang. This rank's main thread may hang too:
        its watcher ends it, once all have been told why."""
        people = [self.people[rank] for rank in hanging if rank != self.rank]
        self.send(self.links, "end", reason, people)
        self.leaving.set()
        self.obey(reason, people, speaks=True)

    def obey(self, reason, people, speaks=False):
        """Kill hung ranks on this machine, and exit at once: the main thread may wait for them."""
        host, process, space = self.people[self.rank]
        for other in people:
            if [other[0], other[2]] == [host, space] and other[1] != process:
                with contextlib.suppress(OSError):
                    os.kill(other[1], signal.SIGKILL)
        line = f"error: {reason}; this ends all {self.count} ranks"
        with contextlib.suppress(OSError, ValueError):
            print(line, flush=True) if self.rank else None  # to its own file, if it has one
            print(line, file=sys.__stderr__, flush=True) if speaks else None
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        time.sleep(0.5)  # so that others can read it
        os._exit(1)

    def fail(self, reason):
        """Tell the others that this rank ends with an error."""
        self.failing.set()
        if self.rank:
            self.send([0], "failed", str(reason))
            self.watcher.join(10)  # rank 0 ends the job
        else:
            self.send(self.links, "end", str(reason), [])
            time.sleep(0.5)

    def leave(self):
        """Disconnect when all ranks have come to the end."""
        self.exchange(None, "the end")
        if self.rank:
            self.links[0].shutdown(socket.SHUT_WR)
        self.watcher.join(5)
        for link in self.links.values():
            link.close()
