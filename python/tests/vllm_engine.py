"""Runs vLLM engines in a process of their own, one after the other: vllm_engine.py JOBS.json RESULTS.json

A job has the model, the options of crumb (or none), whose operators compute beside attention ("vllm" or "torch"), whether it is eager, further
arguments of vllm.LLM, and tasks, which are done one after the other. Its result has facts and results, or `refused`, what was said instead of starting:
    {"generate": [[token, ...], ...], "tokens": n}    greedy, all prompts at once -> {"tokens", "cached", "seconds", ...}
    {"score": [token, ...]}                           -> log-probability of each token but the first
    {"divergence": [token, ...], "file": FILE}        -> compares all log-probabilities with those in FILE, or writes it
    "forget"                                          prefixes
"""

import gc
import json
import os
import sys
import time
import traceback

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1",
                  VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_WORKER_MULTIPROC_METHOD="spawn",
                  TORCH_COMPILE_DISABLE="1")  # a minute of C++ for functions of no weight

import torch  # noqa: E402
from vllm import LLM, SamplingParams, _custom_ops  # noqa: E402

ONEDNN = _custom_ops._supports_onednn


class Engine:
    def __init__(self, job):
        crumb, alone = job.get("crumb"), job["arguments"].get("tensor_parallel_size", 1) == 1
        _custom_ops._supports_onednn = ONEDNN and job["operators"] == "vllm"
        if job["operators"] == "torch":
            job["arguments"].setdefault("compilation_config", {})["custom_ops"] = ["none"]
        self.llm = LLM(job["model"], additional_config={"crumb": crumb} if crumb else {}, enforce_eager=job.get("eager", True), seed=0,
                       distributed_executor_backend="uni" if alone else "mp", **job["arguments"])
        self.model = None
        if not alone:
            return
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.model = worker.model_runner.model

    def facts(self):
        config = self.llm.llm_engine.vllm_config
        if self.model is None:  # it is in other processes
            return {"blocks": config.cache_config.num_gpu_blocks}
        layers = [m for m in self.model.modules() if type(m).__name__ == "Attention"]
        served = getattr(layers[0].impl, "served", None)
        return {
            "blocks": config.cache_config.num_gpu_blocks,
            "implementations": sorted({type(layer.impl).__name__ for layer in layers}),
            "page_bytes": [layer.kv_cache.stride(0) * layer.kv_cache.element_size() for layer in layers],
            "windows_bytes": served.windows_bytes if served else 0,
            "aged_early_tokens": served.windows.aged_early_tokens if served else 0,
            "counts": served.counts.tolist() if served else None,
        }

    def do(self, task):
        if task == "forget":
            return self.llm.reset_prefix_cache()
        if "generate" in task:
            begin, cpu = time.time(), time.process_time()
            outs = self._run(task["generate"], SamplingParams(temperature=0, max_tokens=task["tokens"], ignore_eos=task.get("ignore_eos", False)))
            return {"tokens": [list(out.outputs[0].token_ids) for out in outs], "cached": [out.num_cached_tokens for out in outs],
                    "seconds": time.time() - begin, "cpu_seconds": time.process_time() - cpu}
        if "score" in task:
            out, = self._run([task["score"]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
            return [of[token].logprob for token, of in zip(out.prompt_token_ids, out.prompt_logprobs) if of]
        return self._divergence(task["divergence"], task["file"])

    def _run(self, prompts, sampling):
        sampling.detokenize = False
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    def _divergence(self, ids, file):
        """Mean KLD and share of equal top tokens over the second half of the text, as crumb eval has them."""
        states, forward = [], self.model.forward
        self.model.forward = lambda *args, **keywords: states.append(forward(*args, **keywords)) or states[-1]
        self.llm.reset_prefix_cache()
        self._run([ids], SamplingParams(temperature=0, max_tokens=1))
        self.model.forward = forward
        states = torch.cat(states)[: len(ids)][len(ids) // 2 : -1]
        log_p = torch.cat([self.model.compute_logits(part).float().log_softmax(-1) for part in states.split(256)])
        targets = torch.tensor(ids[len(ids) // 2 + 1 :])
        nll = -log_p.gather(1, targets[:, None]).mean().item()
        if not os.path.exists(file):
            torch.save(log_p, file)
            return {"nll": nll}
        exact = torch.load(file, mmap=True)
        kld = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(exact.split(256), log_p.split(256))])
        return {"nll": nll, "kld": kld.mean().item(), "kld_99.9%": kld.quantile(0.999).item(),
                "same_top": (exact.argmax(-1) == log_p.argmax(-1)).float().mean().item()}


def result(job):
    gc.collect()  # the engine before
    try:
        engine = Engine(job)
    except Exception as e:
        traceback.print_exc()
        return {"refused": " ".join(f"{e} {e.__cause__}".split())}
    results = [engine.do(task) for task in job["tasks"]]
    return {"facts": engine.facts(), "results": results}


def main(jobs_file, results_file):
    json.dump([result(job) for job in json.load(open(jobs_file))], open(results_file, "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
