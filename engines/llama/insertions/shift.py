"""A context that is full drops the middle of its tokens, as llama.cpp's does, and those behind them are computed again at their
new positions: as prompts are, in pieces beside what other slots do. The answer goes on when that is done."""
from insertions.hook import Hook
from insertions.server import SERVER_CPP

SHIFT_SLOT = """\
    llama_tokens kv_behind; // tokens behind those that a shift dropped, which are not computed again yet

"""

SHIFT_RESET = """\
        kv_behind.clear();
"""

SHIFT_ALLOWED = """\
        if (g_kv_memory && g_kv_memory->shifts() && !mctx) {
            params_base.ctx_shift = true;
        }

"""

SHIFT_HELPERS = """\
    void drop_middle(server_slot & slot) {
        if (lora_all_alora(slot.lora)) {
            send_error(slot, "context shift cannot be used with an adapter that begins in the middle of a prompt", ERROR_TYPE_SERVER);
            slot.release();
            return;
        }
        llama_tokens tokens = slot.prompt.tokens.get_tokens();
        const auto & params  = slot.task->params;
        const int64_t n_first = int64_t(params.n_keep < 0 ? slot.task->n_tokens() : params.n_keep) + add_bos_token; // n_keep may be INT32_MAX
        const int n_keep     = std::min<int64_t>(slot.n_ctx - 4, n_first);
        const int n_left     = tokens.size() - n_keep;
        const int n_discard  = std::clamp(params.n_discard ? params.n_discard : n_left / 2, 1, n_left - 1);
        tokens.erase(tokens.begin() + n_keep, tokens.begin() + n_keep + n_discard);
        int n = 0; // of them are there, as they are for a prompt
        if (params.cache_prompt) {
            n = slot.ctx_dft ? g_kv_memory->keep(slot.ctx_tgt, slot.id, tokens.size(), n_keep)
                             : g_kv_memory->reuse(slot.ctx_tgt, slot.id, tokens, n_keep, salt_of(slot), 0);
        }
        slot.mem.seq_rm(slot.id, n, -1);
        slot.prompt.clear();
        slot.prompt.tokens.insert(llama_tokens(tokens.begin(), tokens.begin() + n));
        slot.kv_behind.assign(tokens.begin() + n, tokens.end());
        slot.spec_draft.clear();
        slot.truncated = true;
        g_kv_memory->shifted(slot.ctx_tgt, slot.id, n_discard, slot.kv_behind.size(), slot.n_remaining());
        SLT_WRN(slot, "%d tokens dropped, %zu tokens are computed again\\n", n_discard, slot.kv_behind.size());
    }

    // true: the batch has a piece of them. false: there is no room for it, and the answer has ended
    bool compute_behind(server_slot & slot, int n_batch) {
        const int n = std::min<int>(slot.kv_behind.size(), n_batch - batch.size());
        while (!g_kv_memory->has_room(ctx_tgt, slot.id, n)) {
            if (!clear_idle_slot(slot)) {
                slot.stop           = STOP_TYPE_LIMIT;
                slot.has_next_token = false;
                slot.print_timings();
                send_final_response(slot);
                slot.release();
                return false;
            }
        }
        for (int i = 0; i < n; i++) {
            batch.add(slot.id, slot.kv_behind[i], slot.prompt.tokens.pos_next(), /* output */ false, /* is_prompt */ true);
            slot.prompt.tokens.push_back(slot.kv_behind[i]);
        }
        slot.kv_behind.erase(slot.kv_behind.begin(), slot.kv_behind.begin() + n);
        return true;
    }

"""

SHIFT_BEGIN = """\
                if (g_kv_memory) {
                    drop_middle(slot); // of each answer to a prompt on its own, too
                    return;
                }

"""

SHIFT_WAITS = """\
            if (!slot.kv_behind.empty()) {
                return; // it goes on when they are computed
            }

"""

SHIFT_COMPUTE = """\
                if (!slot.kv_behind.empty()) {
                    if (compute_behind(slot, n_batch) && !slot_batched) {
                        slot_batched = &slot;
                    }
                    return;
                }

"""

HOOKS = [
    Hook("shift, of a slot", SERVER_CPP, "before", r"^    // generation props\n", SHIFT_SLOT),
    Hook("shift, forgotten", SERVER_CPP, "behind", r"^        truncated      = false;\n", SHIFT_RESET),
    Hook("shift, allowed", SERVER_CPP, "before", r"^        if \(llama_model_n_swa\(model_tgt\) == 0\) \{\n", SHIFT_ALLOWED),
    Hook("shift helpers", SERVER_CPP, "before", r"^    void pre_decode\(\) \{\n", SHIFT_HELPERS),
    Hook("shift, begun", SERVER_CPP, "before",
         r"^                if \(slot\.task->is_parent\(\) \|\| slot\.task->is_child\(\)\) \{\n                    send_error\(slot, \"context shift ", SHIFT_BEGIN),
    Hook("shift, no token meanwhile", SERVER_CPP, "before",
         r"^            // check if we can batch this slot with the previous one\n            if ", SHIFT_WAITS),
    Hook("shift, computed", SERVER_CPP, "before", r"^                // this slot still has a prompt to be processed\n", SHIFT_COMPUTE),
]
