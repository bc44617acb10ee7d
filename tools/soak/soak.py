#!/usr/bin/env python3
"""Leave a crumb server alone with unruly clients, and check every answer against the same request run alone.

usage: soak.py CRUMB MODEL_F32.gguf [--minutes 2] [--clients 6] [--seed 1] [--folder FOLDER] [--json FILE]
       (tools/soak/run.sh brings the client)

Clients are the official OpenAI package: chats and streams with shared system prompts and second turns, streams that are
dropped, slow readers, bad bodies; beside them slots are saved and restored, also from files that are cut off, have a bit
flipped, or belong to another recipe. In the first two thirds of the time the server is killed (SIGKILL) every 45 seconds
while it writes a slot file, and started again. It has four slots and less memory than they would like. Slot files go to
FOLDER; on a small file system of its own (mount -t tmpfs -o size=24m none FOLDER) the disk is full now and then.

Fails if an answer is wrong, a damaged slot file is taken, a good one is neither the old nor the new one, the server ends by
itself, its memory grows after the last kill by more than 64 MiB, or pages are still in use when all is done. Weights are F32,
so that a batch of other requests changes a sum by a last bit; where that turns one word into another, the reference must
have had both within 0.02 of each other (a tie; ties are counted). A line every 15 seconds says how far it is.
"""
import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error

try:
    import openai
except ModuleNotFoundError:
    openai = None  # tools/soak/run.sh brings it; --help does without

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import loopback  # noqa: E402
from loopback import message_of  # noqa: E402

TEXT = "The key-value cache of a transformer grows with the length of the text. "
SYSTEMS = [f"You are assistant number {i}. " + TEXT * 12 for i in range(3)]
QUESTIONS = ["What is a cache?", "Why is the sky blue?"]
ANSWER = 20  # tokens
TIE = 0.02   # of a log probability
KEY = "soak"
KILL_EVERY = 45  # seconds
GROWTH = 64  # MiB
SMALL_DISK = 64 << 20  # bytes: one that may be filled


def say(what):
    print(f"soak: {what}", file=sys.stderr, flush=True)


class Server(loopback.Server):
    def __init__(self, crumb, model, folder, log, recipe="quarot:paper", memory="54M"):
        self.folder = folder
        self.kills = 0
        self.down = threading.Event()  # on purpose
        super().__init__([crumb, "serve", "-m", model, "-c", "1024", "-np", "4", "-t", "1", "-b", "256", "-ub", "128", "--jinja",
                          "--kv", recipe, "--kv-recent", "64", "--kv-memory", memory, "--metrics", "--slots",
                          "--slot-save-path", folder, "--api-key", KEY], log, KEY)

    def start(self):
        super().start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=300)
        self.down.clear()

    def path(self, name):
        return os.path.join(self.folder, name)

    def kill_while_it_saves(self):
        """True if the kill came while a file was being written."""
        part = self.path("state.part")
        saving = threading.Thread(target=self.try_save, args=("state",))
        saving.start()
        end = time.monotonic() + 60
        while not os.path.exists(part) and saving.is_alive() and time.monotonic() < end:
            pass
        self.down.set()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        saving.join()
        self.kills += 1
        return os.path.exists(part)

    def try_save(self, name):
        try:
            self.call("/slots/0?action=save", {"filename": name})
        except (OSError, http.client.HTTPException):
            pass


class Soak:
    def __init__(self, server, seed):
        self.server, self.seed = server, seed
        self.done = collections.Counter()
        self.wrong = []
        self.lock = threading.Lock()
        self.disk = threading.Lock()  # of who fills it, or needs it to have room
        self.fills, self.full = 0, False
        self.cached = self.prompted = 0

    def count(self, what):
        with self.lock:
            self.done[what] += 1

    def fail(self, what, **more):
        with self.lock:
            self.wrong.append({"what": what, **more})
        say(f"WRONG: {what}: {more}")

    # --- what is right

    def references(self):
        """Every conversation alone and cold, with the words that were nearly chosen."""
        self.conversations = []
        say(f"{len(SYSTEMS) * (len(QUESTIONS) + 1)} conversations alone, cold")
        for system in SYSTEMS:
            for question in QUESTIONS:
                messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
                first = self.alone(messages)
                if question is QUESTIONS[0]:
                    self.alone(messages + [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Say more."}])

    def alone(self, messages):
        reply = self.server.client.chat.completions.create(
            model="m", messages=messages, max_tokens=ANSWER, temperature=0, logprobs=True, top_logprobs=3, extra_body={"cache_prompt": False})
        words = [(t.token, {o.token: o.logprob for o in t.top_logprobs}) for t in reply.choices[0].logprobs.content]
        one = {"messages": messages, "text": reply.choices[0].message.content, "words": words}
        self.conversations.append(one)
        say(f"{len(self.conversations)}: {one['text'][:60]!r}")
        return one

    def slot_files(self, foreign):
        """A good one, to be damaged, and one of another recipe."""
        self.server.call("/completion", {"prompt": TEXT * 12, "n_predict": 1, "id_slot": 0})
        self.server.call("/slots/0?action=save", {"filename": "good"})
        with open(self.server.path("good"), "rb") as f:
            self.good = f.read()
        os.remove(self.server.path("good"))
        self.foreign = foreign
        with open(self.server.path("text"), "w") as f:
            f.write(TEXT)

    def check(self, one, text, whole, how):
        right = one["text"]
        if text == right if whole else right.startswith(text):
            self.count(how)
            return
        at = 0
        for word, others in one["words"]:
            if text.startswith(word, at):
                at += len(word)
                continue
            best = others.get(word, 0)
            if any(text.startswith(other, at) and best - p < TIE for other, p in others.items() if other != word):
                self.count("ties")
                return
            break
        self.fail("another answer", how=how, messages=one["messages"][-1]["content"], right=right, got=text)

    # --- what clients do

    def chat(self, random, one):
        reply = self.server.client.chat.completions.create(model="m", messages=one["messages"], max_tokens=ANSWER, temperature=0)
        self.check(one, reply.choices[0].message.content, True, "chats")
        usage = reply.usage
        with self.lock:
            self.prompted += usage.prompt_tokens
            self.cached += usage.prompt_tokens_details.cached_tokens
        if not 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens:
            self.fail("cached_tokens", usage=usage.model_dump())

    def stream(self, random, one, pause=0.0, pieces=None):
        text, n = "", 0
        with self.server.client.chat.completions.create(model="m", messages=one["messages"], max_tokens=ANSWER, temperature=0,
                                                        stream=True) as stream:
            for event in stream:
                text += (event.choices[0].delta.content or "") if event.choices else ""
                n += 1
                time.sleep(pause)
                if n == pieces:
                    break
        self.check(one, text, pieces is None, "streams dropped" if pieces else "slow readers" if pause else "streams")

    def slow_reader(self, random, one):
        self.stream(random, one, pause=random.uniform(0.05, 0.3))

    def drop(self, random, one):
        self.stream(random, one, pieces=random.randrange(1, ANSWER))

    def drop_unread(self, random, one):
        with socket.create_connection(("127.0.0.1", self.server.port)) as s:
            body = json.dumps({"messages": one["messages"], "max_tokens": 200, "stream": random.random() < 0.5}).encode()
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (KEY.encode(), len(body)))
            s.sendall(body if random.random() < 0.8 else body[:len(body) // 2])
            time.sleep(random.uniform(0, 1.5))
        self.count("dropped unread")

    def bad_body(self, random, one):
        path, body = random.choice([
            ("/v1/chat/completions", b"{"), ("/v1/chat/completions", b'{"messages": 3}'), ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}'),
            ("/v1/completions", b'{"prompt": "a", "max_tokens": "b"}'), ("/completion", b'{"prompt": [-7, 1000000000]}'),
            ("/completion", json.dumps({"prompt": TEXT * 300}).encode()),
            ("/slots/0?action=restore", b'{"filename": "../text"}'), ("/slots/0?action=restore", b'{"filename": "text"}'), ("/slots/77?action=nothing", b"{}"),
            ("/nowhere", b"{}"), ("/v1/chat/completions", b"\xff\xfe" * 1000)])
        try:
            self.server.call(path, raw=body)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            error.close()
            self.count("bad bodies refused")
        else:
            self.fail("a bad body was answered", path=path, body=body[:80].decode(errors="replace"))

    def save(self, slot, name):
        """Tokens that were saved; None if the disk was full, or the slot held none, as may be."""
        full, fills = self.full, self.fills
        try:
            return self.server.call(f"/slots/{slot}?action=save", {"filename": name})["n_saved"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                raise
            message = message_of(error)
            if "holds no tokens" not in message and ("could not be written" not in message or not (full or self.full or fills != self.fills)):
                self.fail("a slot was not saved", message=message)
            return None

    def save_and_restore(self, random, one):
        name, a, b = f"slot{random.randrange(3)}", random.randrange(4), random.randrange(4)
        if self.save(a, name) is None and not os.path.exists(self.server.path(name)):
            return
        try:
            self.server.call(f"/slots/{b}?action=restore", {"filename": name})
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            message = message_of(error)
            if "blocks are free" not in message:  # a full cache may refuse
                self.fail("a slot was not restored", message=message)
        self.count("slots saved and restored")

    def damaged(self, random, one):
        at = random.randrange(len(self.good))
        how, data = random.choice([("cut off", self.good[:at]), ("of another recipe", self.foreign),
                                   ("bit flipped", self.good[:at] + bytes([self.good[at] ^ 1 << random.randrange(8)]) + self.good[at + 1:])])
        name = f"bad{threading.get_ident()}"
        with self.disk:
            with open(self.server.path(name), "wb") as f:
                f.write(data)
        try:
            self.server.call(f"/slots/{random.randrange(4)}?action=restore", {"filename": name})
            self.fail("a damaged slot file was taken", how=how, at=at, size=len(data))
        except urllib.error.HTTPError as error:
            if not 400 <= error.code < 500:
                raise
            self.count("slot files refused, " + how)
        finally:
            os.remove(self.server.path(name))

    def full_disk(self, random, one):
        disk = os.statvfs(self.server.folder)
        if disk.f_blocks * disk.f_frsize > SMALL_DISK:
            return
        filler = self.server.path("filler")
        with self.disk:
            if self.save(0, "full") is None:
                return
            with open(self.server.path("full"), "rb") as f:
                old = f.read()
            self.fills, self.full = self.fills + 1, True
            try:
                with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
                    while f.write(bytes(1 << 16)):
                        pass
                saved = self.save(0, "full")
                with open(self.server.path("full"), "rb") as f:
                    if saved is None and f.read() != old:
                        self.fail("a full disk changed a slot file")
                if saved is None:
                    self.count("saves refused by a full disk")
            finally:
                os.remove(filler)
                self.full = False

    ACTIONS = [(chat, 6), (stream, 6), (slow_reader, 2), (drop, 4), (drop_unread, 2), (bad_body, 3), (save_and_restore, 1), (damaged, 2), (full_disk, 1)]

    def client(self, number, end):
        dice = random.Random(self.seed * 1000 + number)
        while time.monotonic() < end:
            action = dice.choices([a for a, _ in self.ACTIONS], [w for _, w in self.ACTIONS])[0]
            down, process = self.server.down.is_set(), self.server.process
            try:
                action(self, dice, dice.choice(self.conversations))
            except (openai.APIConnectionError, OSError, http.client.HTTPException) as error:
                if down or self.server.down.is_set() or process is not self.server.process or process.poll() == -signal.SIGKILL:
                    self.count("lost by a kill")
                    time.sleep(0.5)
                elif isinstance(error, urllib.error.HTTPError):
                    self.fail("an error", action=action.__name__, status=error.code, message=message_of(error))
                else:
                    self.fail("the connection broke", action=action.__name__, error=repr(error))
            except openai.APIError as error:
                if down or process is not self.server.process or self.server.down.is_set():
                    self.count("lost by a kill")
                else:
                    self.fail("an error", action=action.__name__, error=repr(error))
            if process.poll() not in (None, -signal.SIGKILL):
                self.fail("the server ended", status=process.poll())
                return

    def run(self, minutes, clients, foreign):
        self.references()
        self.slot_files(foreign)
        say(f"now {clients} clients for {minutes:g} minutes")
        start = time.monotonic()
        end, last_kill = start + 60 * minutes, start + 40 * minutes
        threads = [threading.Thread(target=self.client, args=(i, end)) for i in range(clients)]
        for thread in threads:
            thread.start()
        self.memory = []  # (time, MiB)
        next_kill, next_word = start + KILL_EVERY, start
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            now = time.monotonic()
            if next_kill < now < last_kill:
                self.kill()
                next_kill = time.monotonic() + KILL_EVERY
            if self.server.process.poll() is None:
                self.memory.append((now, self.server.memory_mib()))
            if now > next_word:
                next_word = now + 15
                say(f"{now - start:.0f} s: {sum(self.done.values())} done, {len(self.wrong)} wrong, {self.server.kills} kills, {self.memory[-1][1]:.0f} MiB")
        for thread in threads:
            thread.join()
        self.quiet = [m for t, m in self.memory if t > last_kill]
        half = len(self.quiet) // 2
        if max(self.quiet[half:]) > max(self.quiet[:half]) + GROWTH:
            self.fail("memory grows", first=max(self.quiet[:half]), then=max(self.quiet[half:]))
        self.at_rest()

    def kill(self):
        with self.disk:
            self.server.try_save("state")  # so that there is an old one
            if self.server.kill_while_it_saves():
                self.count("kills while a file was written")
        self.server.start()
        try:
            self.server.call("/slots/1?action=restore", {"filename": "state"})
        except urllib.error.HTTPError as error:
            message = message_of(error)
            if "blocks are free" not in message:
                self.fail("a slot file after a kill", message=message)
        self.count("kills")

    def at_rest(self):
        for _ in range(600):
            if self.server.metrics()["llamacpp:requests_processing"] == self.server.metrics()["llamacpp:requests_deferred"] == 0:
                break
            time.sleep(0.1)
        else:
            self.fail("requests that never end")
        for slot in range(4):
            self.server.call(f"/slots/{slot}?action=erase", {})
        for name in ("crumb:kv_pages_in_use", "crumb:kv_cache_bytes_in_use"):
            if self.server.metrics()[name] != 0:
                self.fail("a leak", metric=name, value=self.server.metrics()[name])
        if self.server.metrics()["crumb:kv_tokens_aged_early_total"] != 0:
            self.fail("tokens aged early", value=self.server.metrics()["crumb:kv_tokens_aged_early_total"])
        one = self.conversations[0]
        self.chat(random.Random(0), one)

    def report(self):
        return {"answers": dict(sorted(self.done.items())), "wrong": self.wrong, "prompt_tokens": self.prompted, "cached_tokens": self.cached,
                "kills": self.server.kills, "slots_saved_on": "a small disk" if self.fills else "a large disk",
                "memory_MiB": {"largest": max(m for _, m in self.memory), "after_the_last_kill": self.quiet[0], "at_the_end": self.quiet[-1]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crumb")
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="of slot files; default: a temporary one")
    parser.add_argument("--json", help="write the report there")
    args = parser.parse_args()
    if not openai:
        parser.exit(1, "soak: error: the Python package openai is not there: call tools/soak/run.sh, which brings it\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = args.folder or os.path.join(scratch, "slots"), os.path.join(scratch, "log")
        os.makedirs(folder, exist_ok=True)
        say("a slot file of another recipe")
        other = Server(args.crumb, args.model, folder, log, recipe="bf16", memory="256M")
        other.call("/completion", {"prompt": TEXT * 12, "n_predict": 1, "id_slot": 0})
        other.call("/slots/0?action=save", {"filename": "foreign"})
        other.stop()
        with open(other.path("foreign"), "rb") as f:
            foreign = f.read()
        os.remove(other.path("foreign"))
        server = Server(args.crumb, args.model, folder, log)
        soak = Soak(server, args.seed)
        try:
            soak.run(args.minutes, args.clients, foreign)
        finally:
            server.stop()
        report = {"clients": args.clients, "minutes": args.minutes, **soak.report()}
        if report["wrong"]:
            print("".join(server.output().splitlines(True)[-60:]), file=sys.stderr)
    print(json.dumps(report, indent=1))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=1)
            f.write("\n")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
