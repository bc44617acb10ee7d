"""What SGLang's configurator of the cache says to each case: sglang_refusals.py MODEL CASES.json. One line a case. The model is
loaded once, by SGLang's own runner; a case changes what it was loaded with."""

import dataclasses
import json
import sys

from sglang_engine import arguments_of


def said(runner, crumb, resolved={}, configurator={}, layer={}, layers=1, memory=1 << 40):
    """resolved: of SGLang's configuration; configurator, layer: attributes of KVCacheConfigurator, of RadixAttention."""
    from crumb_kv.sglang import pool, served
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_context

    usual = {"max_running_requests": 16, "enable_hierarchical_cache": False, "speculative_algorithm": None}
    get_context().override("test", **{**usual, "json_model_override_args": json.dumps({"crumb": crumb} if crumb else {}), **resolved})
    changed = dataclasses.replace(runner.kv_cache_configurator, **configurator)
    attentions = [m for m in runner.model.modules() if isinstance(m, RadixAttention)][:layers]
    before = [{name: getattr(m, name) for name in layer} for m in attentions]
    try:
        for m in attentions:
            vars(m).update(layer)
        served._served.clear()
        pool.without_windows(lambda *_: memory, changed, 0)
        return "no"
    except ValueError as e:
        return " ".join(str(e).split())
    finally:
        for m, was in zip(attentions, before):
            vars(m).update(was)


def main(model, cases_file):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch

    args = one_batch.ServerArgs(**arguments_of({"model": model, "crumb": {"recipe": "had2"}, "arguments": {}}))
    ports = one_batch.PortArgs.init_new(args)
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    runner = one_batch.load_model(args, ports, 0, 0)[0].torch_runner
    for case in json.load(open(cases_file)):
        print("REFUSED", said(runner, **case), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
