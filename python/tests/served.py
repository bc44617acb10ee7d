"""What the tests of the serving engines ask an engine. Prompts of some 730 tokens that begin alike: they are cut into chunks of 256, find
each other's prefix, and decode beside each other."""

QUESTIONS = ["What is the capital of France?", "List the days of the week.", "What is 2 plus 2?", "Write one sentence about rain."]
ANSWER = 16  # tokens


def prompts(text, chat):
    return [text[:700] + chat(question) for question in QUESTIONS]


def tasks(text, prompts):
    """By name; a list is several tasks. In the terms of vllm_engine.py and sglang_engine.py."""
    ask = lambda prompts: {"generate": prompts, "tokens": ANSWER}
    return {
        "score": {"score": text[:1000]},
        "forget the text": "forget",
        "solo": [ask([prompt]) for prompt in prompts],
        "hit": ask(prompts[:1]),
        "forget": "forget",
        "again": ask(prompts[:1]),
        "forget again": "forget",
        "together": ask(4 * prompts),
    }


def flat(tasks):
    return [task for some in tasks.values() for task in (some if isinstance(some, list) else [some])]


def by_name(tasks, results):
    results = iter(results)
    return {name: [next(results) for _ in some] if isinstance(some, list) else next(results) for name, some in tasks.items()}
