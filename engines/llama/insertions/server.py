"""What the server asks of such a memory: what a prompt can start from, whether there is room, and whether a state fits."""
from insertions.hook import Hook

SERVER_H = "tools/server/server-context.h"
SERVER_CPP = "tools/server/server-context.cpp"

SERVER_DECLARE = """\
// a KV memory of another library, as the server talks to it; calls come from the main loop, except props() and metrics()
struct server_kv_memory {
    enum verdict { ADMIT, WAIT, REFUSE };

    virtual ~server_kv_memory() = default;

    // make the sequence hold the longest start of these tokens that can be had, at most all but one; of its own tokens
    // the first n_own are known to be theirs. sequences of different salts share nothing. other prompts are likely to
    // begin with the first n_common of the tokens too
    virtual int32_t reuse(llama_context * ctx, int id, const llama_tokens & tokens, int32_t n_own, uint64_t salt, int32_t n_common) = 0;
    // how many of its own first n_own tokens the sequence can keep for a prompt of n_prompt, where no others are looked for
    virtual int32_t keep(llama_context * ctx, int id, int32_t n_prompt, int32_t n_own) = 0;

    // room for a prompt and n_predict more tokens (-1: not known), until release(). tokens: of the prompt, so that what
    // others compute meanwhile is kept for it; none if they are not only text. why: what a refusal says
    virtual verdict admit(llama_context * ctx, int id, const llama_tokens & tokens, int32_t n_prompt, int32_t n_predict, std::string & why) = 0;
    virtual void release(llama_context * ctx, int id) = 0;
    virtual bool has_room(llama_context * ctx, int id, int32_t n_tokens) = 0;

    // whether a context that is full drops tokens of its middle, and those behind them are computed again. that it did, how
    // many will be, and how many may follow (-1: not known): from here on they need room, as far as there is some
    virtual bool shifts() = 0;
    virtual void shifted(llama_context * ctx, int id, int32_t n_dropped, int32_t n_computed, int32_t n_predict) = 0;

    // whether the state that follows behind n_bytes of a file belongs to these tokens
    virtual bool matches(llama_context * ctx, const std::string & path, size_t n_bytes, const llama_tokens & tokens) = 0;
    virtual std::string refusal() = 0; // why the last state did not match or was not restored; nothing was changed

    virtual std::string props()   = 0; // JSON
    virtual std::string metrics() = 0; // Prometheus
};

// before the server starts; nullptr: there is none
void server_set_kv_memory(server_kv_memory * memory);

"""

SERVER_DEFINE = """\
static server_kv_memory * g_kv_memory = nullptr;

void server_set_kv_memory(server_kv_memory * memory) {
    g_kv_memory = memory;
}

// a slot file appears under its name only when it is whole
static bool server_kv_finish_save(const std::string & part, const std::string & path, size_t n_written) {
    std::error_code error;
    if (n_written > 0 && std::filesystem::file_size(part, error) == n_written && !error) {
        std::filesystem::rename(part, path, error);
        if (!error) {
            return true;
        }
    }
    std::error_code ignored;
    std::filesystem::remove(part, ignored);
    return false;
}

// the tokens that a slot file says it is of, as they are in a sequence; false: they are damaged
static bool server_kv_read_tokens(const std::string & path, size_t n_packed, bool has_mtmd, llama_tokens & tokens) {
    llama_tokens packed(n_packed);
    std::ifstream file(path, std::ios::binary);
    file.seekg(3 * sizeof(uint32_t));
    if (!file.read(reinterpret_cast<char *>(packed.data()), packed.size() * sizeof(llama_token))) {
        return false;
    }
    try {
        const server_tokens read = server_tokens::deserialize(packed, has_mtmd);
        for (size_t i = 0; i < read.size(); i++) {
            tokens.push_back(read[i]);
        }
    } catch (const std::exception &) {
        return false;
    }
    return true;
}

"""

SERVER_RELEASE = """\
            if (g_kv_memory) {
                g_kv_memory->release(ctx_tgt, id);
            }

"""

SERVER_HELPERS = """\
    std::map<int, server_task> kv_waiting; // for room, the oldest first

    // what else than its tokens decides K and V of a slot
    static uint64_t salt_of(const server_slot & slot) {
        uint64_t salt = 0;
        for (const auto & lora : slot.lora) {
            if (lora.scale != 0.0f) {
                salt = salt * 31 + std::hash<std::string>{}(lora.path + ":" + std::to_string(lora.scale));
            }
        }
        if (lora_all_alora(slot.lora)) {
            salt = ~(uint64_t) slot.task->id; // applies to some of the tokens only
        }
        return salt;
    }

    // what the prompt of the slot's task can start from: n_past tokens of the slot, or others that the KV memory has
    int reuse_prefix(server_slot & slot, int n_past) {
        const auto & input = slot.task->tokens;
        if (!g_kv_memory || !slot.task->params.cache_prompt || !slot.task->need_sampling()) {
            return n_past;
        }
        if (slot.ctx_dft || input.has_mtmd) {
            // the draft, and what is not text, are not looked for elsewhere
            const int n_keep = g_kv_memory->keep(slot.ctx_tgt, slot.id, input.size(), n_past);
            return n_keep < n_past && input.has_mtmd ? 0 : n_keep; // never a part of an image
        }
        int n_common = 0; // what comes before the first message of a user
        for (const auto & span : slot.task->params.message_spans.spans) {
            if (span.role == COMMON_CHAT_ROLE_USER) {
                n_common = (int) span.pos;
                break;
            }
        }
        const llama_tokens & tokens = input.get_tokens();
        const int n = g_kv_memory->reuse(slot.ctx_tgt, slot.id, tokens, n_past, salt_of(slot), n_common);
        slot.prompt.tokens.keep_first(std::min(n, n_past));
        for (int i = slot.prompt.n_tokens(); i < n; i++) {
            slot.prompt.tokens.push_back(tokens[i]);
        }
        return n;
    }

    // the least recently used slot that is idle and holds something, but for one
    bool clear_idle_slot(const server_slot & but) {
        server_slot * idle = nullptr;
        for (auto & slot : slots) {
            if (&slot != &but && !slot.is_processing() && slot.prompt.n_tokens() > 0 && (!idle || slot.t_last_used < idle->t_last_used)) {
                idle = &slot;
            }
        }
        if (idle) {
            idle->prompt_clear();
        }
        return idle != nullptr;
    }

    void retry_waiting() {
        if (!kv_waiting.empty()) {
            server_task task = std::move(kv_waiting.begin()->second);
            kv_waiting.erase(kv_waiting.begin());
            queue_tasks.post(std::move(task), true);
        }
    }

    // false: the task waits for room, behind those that came before it, or was refused
    bool admit_task(server_task & task, const server_slot & slot) {
        if (!g_kv_memory || !task.need_sampling()) {
            return true;
        }
        int n_busy = 0;
        for (auto & other : slots) {
            n_busy += other.is_processing();
            if (!other.is_processing()) {
                g_kv_memory->release(ctx_tgt, other.id); // a task that was admitted and could not be launched
            }
        }
        const int id = task.id;
        if (!kv_waiting.empty() && kv_waiting.begin()->first < id) {
            kv_waiting.emplace(id, std::move(task));
            return false;
        }
        std::string why;
        const llama_tokens none;
        const bool is_text = task.params.cache_prompt && !task.tokens.has_mtmd;
        const int n_predict = task.params.n_predict != -1 ? task.params.n_predict : params_base.n_predict;
        auto verdict = server_kv_memory::WAIT;
        do {
            verdict = g_kv_memory->admit(ctx_tgt, slot.id, is_text ? task.tokens.get_tokens() : none, task.n_tokens(), n_predict, why);
        } while (verdict == server_kv_memory::WAIT && clear_idle_slot(slot));
        if (verdict == server_kv_memory::WAIT) {
            SLT_INF(slot, "task %d waits for room in the KV memory\\n", id);
            kv_waiting.emplace(id, std::move(task));
            return false;
        }
        if (n_busy == 0 || n_busy + 1 < (int) slots.size()) {
            retry_waiting(); // there may be room for one more
        }
        if (verdict == server_kv_memory::REFUSE) {
            send_error(id, why, ERROR_TYPE_EXCEED_CONTEXT_SIZE, std::max(1, task.n_tokens()), slot.n_ctx);
        }
        return verdict == server_kv_memory::ADMIT;
    }

"""

SERVER_RETRY = """\
                retry_waiting();
"""

SERVER_CANCEL = """\
                    if (kv_waiting.erase(task.id_target) > 0) {
                        retry_waiting();
                    }
"""

SERVER_WAITING = """\
                    res->n_tasks_deferred   += kv_waiting.size();
"""

SERVER_ADMIT = """\
                    if (!admit_task(task, *slot)) {
                        break;
                    }

"""

SERVER_START = """\
                        n_past = reuse_prefix(slot, n_past);

"""

SERVER_CATCH_UP = """\
                    // another slot may have computed more of the same text meanwhile
                    if (const int n_have = slot.prompt.n_tokens(), n_now = reuse_prefix(slot, n_have); n_now > n_have) {
                        slot.stats.n_prompt_cached += n_now - n_have;
                        metrics.add_prompt_cached(n_now - n_have);
                    }

"""

SERVER_LIMIT = """\
        while (g_kv_memory && slot.has_next_token && !g_kv_memory->has_room(ctx_tgt, slot.id, 1 + (spec ? common_speculative_n_max(spec.get()) : 0))) {
            if (clear_idle_slot(slot)) {
                continue;
            }
            slot.truncated      = true;
            slot.stop           = STOP_TYPE_LIMIT;
            slot.has_next_token = false;

            SLT_WRN(slot, "stopped because the KV memory is full, n_tokens = %d, n_gen = %d\\n", slot.prompt.n_tokens(), (int) slot.stats.n_gen);
        }

"""

SERVER_SAVE = """\
                    const std::string filepath_whole = filepath;
                    if (g_kv_memory) {
                        if (slot->prompt.n_tokens() == 0) {
                            send_error(task, "Unable to save slot: slot " + std::to_string(slot->id) + " holds no tokens, and a file of none would replace '" + filename +
                                       "': send a request with \\"id_slot\\": " + std::to_string(slot->id) + " first, or save another slot",
                                       ERROR_TYPE_INVALID_REQUEST);
                            break;
                        }
                        // what is being written has this name: a file of it would be lost when another is saved
                        if (filename.size() >= 5 && filename.compare(filename.size() - 5, 5, ".part") == 0) {
                            send_error(task, "Unable to save slot: '" + filename + "' ends in .part, as files that are being written do: give another name",
                                       ERROR_TYPE_INVALID_REQUEST);
                            break;
                        }
                        filepath += ".part";
                    }

"""

SERVER_SLOT_NUMBER = """\
        if (id_slot < 0) {
            res->error(format_error_response("Invalid slot ID " + id_slot_str + ": slots are numbered from 0", ERROR_TYPE_INVALID_REQUEST));
            return res;
        }

"""

SERVER_SAVED = """\
                    if (g_kv_memory && !server_kv_finish_save(filepath, filepath_whole, nwrite)) {
                        send_error(task, "Unable to save slot: " + filepath_whole + " could not be written", ERROR_TYPE_SERVER);
                        break;
                    }
"""

SERVER_RESTORE = """\
                            llama_tokens tokens;
                            const size_t n_bytes = 3 * sizeof(uint32_t) + packed.size() * sizeof(llama_token);
                            if (g_kv_memory && (!server_kv_read_tokens(filepath, packed.size(), mctx != nullptr, tokens) ||
                                                !g_kv_memory->matches(ctx_tgt, filepath, n_bytes, tokens))) {
                                send_error(task, "Unable to restore slot: " + g_kv_memory->refusal(), ERROR_TYPE_INVALID_REQUEST);
                                break;
                            }
"""

SERVER_NOT_RESTORED = """\
                            if (g_kv_memory) {
                                std::string why = g_kv_memory->refusal();
                                std::error_code error;
                                if (!std::filesystem::exists(filepath, error) && !error) {
                                    why = "there is no file " + filepath + ": POST /slots/" + std::to_string(id_slot) +
                                          "?action=save with {\\"filename\\": \\"" + filename + "\\"} makes one";
                                }
                                send_error(task, "Unable to restore slot: " + why, ERROR_TYPE_INVALID_REQUEST);
                                break;
                            }
"""

SERVER_PROPS = """\
    if (g_kv_memory) {
        props["kv_cache"] = json::parse(g_kv_memory->props());
    }
"""

SERVER_METRICS = """\
            if (g_kv_memory) {
                res->data += g_kv_memory->metrics();
            }
"""

HOOKS = [
    Hook("server declaration", SERVER_H, "before", r"^struct server_context_impl; // private implementation\n", SERVER_DECLARE),
    Hook("server definition", SERVER_CPP, "before", r"^enum slot_state \{\n", SERVER_DEFINE),
    Hook("slot release", SERVER_CPP, "before", r"^            callback_on_reset\(\*this\);\n", SERVER_RELEASE),
    Hook("server helpers", SERVER_CPP, "before", r"^    server_slot \* get_slot_by_id\(int id_slot\) \{\n", SERVER_HELPERS),
    Hook("room while generating", SERVER_CPP, "before", r"^        // check the limits\n", SERVER_LIMIT),
    Hook("waiting, a slot is free", SERVER_CPP, "behind", r"^ *queue_tasks\.pop_deferred_task\(id_slot\);\n", SERVER_RETRY),
    Hook("waiting, cancelled", SERVER_CPP, "behind", r"^ *case SERVER_TASK_TYPE_CANCEL:\n *\{\n", SERVER_CANCEL),
    Hook("waiting, counted", SERVER_CPP, "behind", r"^ *res->n_tasks_deferred *= [^\n]*\n", SERVER_WAITING),
    Hook("admission", SERVER_CPP, "before", r"^                    if \(task\.is_parent\(\)\) \{\n", SERVER_ADMIT),
    Hook("slot number", SERVER_CPP, "before", r"^        std::string action = req\.get_param\(\"action\"\);\n", SERVER_SLOT_NUMBER),
    Hook("slot file, begun", SERVER_CPP, "before", r"^ *GGML_ASSERT\(packed\.size\(\) % sizeof\(llama_token\) == 0\);\n", SERVER_SAVE),
    Hook("slot file, whole", SERVER_CPP, "before", r"^ *if \(nwrite == 0\) \{\n", SERVER_SAVED),
    Hook("slot file, of its tokens", SERVER_CPP, "behind", r"^ *packed\.resize\(std::max<size_t>\(1, n_packed\)\);\n", SERVER_RESTORE),
    Hook("slot file, refused", SERVER_CPP, "before", r"^ *throw std::runtime_error\(\"No available space in KV cache or invalid",
         SERVER_NOT_RESTORED),
    Hook("prefix, at the start", SERVER_CPP, "before", r"^                        // \[TAG_PROMPT_LOGITS\]\n", SERVER_START),
    Hook("prefix, later", SERVER_CPP, "before", r"^ *// truncate any tokens that are beyond n_past for this slot\n", SERVER_CATCH_UP),
    Hook("properties", SERVER_CPP, "before", r"^    if \(params\.use_jinja\) \{\n", SERVER_PROPS,
         after=r"^static json get_res_props\("),
    Hook("metrics, asleep", SERVER_CPP, "behind", r"^            res->data = tmp\.to_metrics\(\);\n", SERVER_METRICS),
    Hook("metrics", SERVER_CPP, "behind", r"^            res->data = res_task->to_metrics\(\);\n", SERVER_METRICS),
]
