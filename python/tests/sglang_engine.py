"""Runs an SGLang engine: sglang_engine.py JOB.json RESULT.json

A job has the model, the options of crumb (or none), further arguments of sglang.Engine, and tasks, which are done one after the other:
    {"generate": [[token, ...], ...], "tokens": n}    greedy, all prompts at once -> {"tokens", "cached"}
    {"score": [token, ...]}                           -> log-probability of each token but the first
    "forget"                                          prefixes
"""

import json
import os
import sys
import time

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def arguments_of(job):
    """For a CPU, without kernels that SGLang has on GPUs only."""
    crumb = {"attention_backend": "crumb", "json_model_override_args": json.dumps({"crumb": job["crumb"]})} if job.get("crumb") else {}
    return {"model_path": job["model"], "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "page_size": 64,
            "context_length": 2048, "max_total_tokens": 16384, "max_running_requests": 16, "chunked_prefill_size": 256,
            "mem_fraction_static": 0.3, "disable_cuda_graph": True, "grammar_backend": "none", "sampling_backend": "pytorch",
            "skip_server_warmup": True, "random_seed": 0, "log_level": "info", **crumb, **job["arguments"]}


def do(engine, task):
    if task == "forget":  # refused while the scheduler has not heard of the end of the last request
        return any(engine.flush_cache().success or time.sleep(0.1) for _ in range(100))
    if "score" in task:
        out = engine.generate(input_ids=task["score"], sampling_params={"temperature": 0, "max_new_tokens": 1}, return_logprob=True,
                              logprob_start_len=0)
        return [log_p for log_p, _, _ in out["meta_info"]["input_token_logprobs"][1:]]
    outs = engine.generate(input_ids=task["generate"], sampling_params={"temperature": 0, "max_new_tokens": task["tokens"]})
    return {"tokens": [out["output_ids"] for out in outs], "cached": [out["meta_info"]["cached_tokens"] for out in outs]}


def main(job_file, result_file):
    from sglang.srt.entrypoints.engine import Engine

    job = json.load(open(job_file))
    engine = Engine(**arguments_of(job))
    results = [do(engine, task) for task in job["tasks"]]
    engine.shutdown()
    json.dump(results, open(result_file, "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
