#include "serving.h"

#include "kv.h"
#include "memory.h"

#include "server-context.h"

#include <crumb/error.h>

#include <algorithm>
#include <atomic>
#include <fstream>

namespace crumb::llama {

namespace {

Memory* memory_of(llama_context* context) { return dynamic_cast<Memory*>(llama_get_memory(context)); }

// Prometheus text: a line of help, a line of type, a value.
class Text {
public:
    void add(std::string_view name, std::string_view type, std::string_view help, auto value) {
        text_ += fmt::format("# HELP crumb:{0} {2}.\n# TYPE crumb:{0} {1}\ncrumb:{0} {3}\n", name, type, help, value);
    }
    std::string take() { return std::move(text_); }

private:
    std::string text_;
};

class Serving : public server_kv_memory {
public:
    explicit Serving(bool shift) : shift_(shift) {}

    int32_t reuse(llama_context* context, int id, const llama_tokens& tokens, int32_t n_own, uint64_t salt, int32_t n_common) override {
        Memory* memory = memory_of(context);
        return memory ? memory->reuse(id, tokens, n_own, salt, n_common) : n_own;
    }

    int32_t keep(llama_context* context, int id, int32_t n_prompt, int32_t n_own) override {
        Memory* memory = memory_of(context);
        return memory ? memory->keep(id, n_prompt, n_own) : n_own;
    }

    verdict admit(llama_context* context, int id, const llama_tokens& tokens, int32_t n_prompt, int32_t n_predict,
                  std::string& why) override {
        Memory* memory = memory_of(context);
        // A prompt that is longer than its context is for the server to refuse.
        if (!memory || n_prompt >= memory->config().tokens_per_sequence) { return ADMIT; }
        Cache& cache = memory->cache();
        const int64_t wanted = int64_t(n_prompt) + std::max(n_predict, 1);
        if (cache.promise(id, wanted)) {
            cache.announce(id, tokens);
            memory->begin_prompt(id);
            return ADMIT;
        }
        const int64_t most = cache.longest_promise();
        if (std::min(wanted, cache.config().tokens_per_sequence) <= most) { return WAIT; }
        why = fmt::format("the request needs room for {} tokens ({} of the prompt and up to {} more), the KV cache has room for {} in "
                          "a request: shorten it, or start with more --kv-memory",
                          wanted, n_prompt, std::max(n_predict, 1), most);
        return REFUSE;
    }

    void release(llama_context* context, int id) override {
        if (Memory* memory = memory_of(context)) {
            memory->cache().end_promise(id);
            memory->cache().announce(id, {});
        }
    }

    bool has_room(llama_context* context, int id, int32_t n_tokens) override {
        Memory* memory = memory_of(context);
        // Where the context of a sequence ends is for the server to say.
        if (!memory || memory->cache().length(id) + n_tokens > memory->cache().config().tokens_per_sequence) { return true; }
        return memory->cache().has_room(id, n_tokens);
    }

    bool shifts() override { return shift_; }

    void shifted(llama_context* context, int id, int32_t n_dropped, int32_t n_computed, int32_t n_predict) override {
        Memory* memory = memory_of(context);
        if (!memory) { return; }
        ++shifts_;
        dropped_ += uint64_t(n_dropped);
        computed_ += uint64_t(n_computed);
        // Pages that it shared are no longer its own: what it was promised is promised anew, or no more.
        Cache& cache = memory->cache();
        if (!cache.promise(id, int64_t(cache.length(id)) + n_computed + std::max(n_predict, 1))) { cache.end_promise(id); }
    }

    bool matches(llama_context* context, const std::string& path, size_t n_bytes, const llama_tokens& tokens) override {
        Memory* memory = memory_of(context);
        if (!memory) { return true; }
        try {
            std::ifstream file(path, std::ios::binary);
            file.seekg(std::streamoff(n_bytes));
            if (memory->saved_ids([&](void* data, size_t size) {
                    if (!file.read(static_cast<char*>(data), std::streamsize(size))) { fail("the file is cut off"); }
                }) == tokens) { return true; }
            remember_refusal("its list of tokens is damaged: it differs from that of its state");
        } catch (const Error& e) {
            remember_refusal(e.what());
        }
        return false;
    }

    std::string refusal() override {
        const std::string why = last_refusal();
        remember_refusal({});
        return why.empty() ? "this is no slot file, or it is cut off" : why;
    }

    std::string props() override { return kv_properties(); }

    std::string metrics() override {
        const auto status = served_status();
        if (!status) { return {}; }
        const auto& [bytes, c, working, prompts, sequences, drift] = *status;
        Text text;
        text.add("kv_cache_bytes", "gauge", "Bytes of the KV cache", bytes.total());
        text.add("kv_cache_bytes_in_use", "gauge", "Bytes of what sequences hold", c.bytes_in_use);
        text.add("kv_cache_capacity_tokens", "gauge", "Tokens for which the KV cache has room", bytes.tokens);
        text.add("kv_cache_usage_ratio", "gauge", "Pages of sequences, of all pages",
                 c.blocks_total == 0 ? 0.0 : double(c.blocks_in_use) / double(c.blocks_total));
        text.add("kv_cache_bits_per_element", "gauge", "Bits per element of a page", bytes.bits_per_element);
        text.add("kv_pages_in_use", "gauge", "Pages of 64 tokens that sequences hold", c.blocks_in_use);
        text.add("kv_pages_shared", "gauge", "Pages that more than one sequence holds", c.shared_blocks);
        text.add("kv_pages_kept", "gauge", "Pages that no sequence holds and a prompt may find again", c.kept_blocks);
        text.add("kv_pages_evicted_total", "counter", "Kept pages that gave their place to others", c.evicted_blocks);
        text.add("kv_pages_demoted_total", "counter", "Pages whose tokens left the exact window and became codes", c.demoted_blocks);
        text.add("prefix_cache_queries_total", "counter", "Tokens of prompts", prompts.tokens);
        text.add("prefix_cache_hits_total", "counter", "Tokens of prompts that were found in the KV cache", prompts.found);
        text.add("prefix_tokens_found_total", "counter", "Tokens of prompts that were found in the KV cache outside of their slot",
                 c.found_tokens);
        text.add("kv_tokens_aged_early_total", "counter", "Tokens that a rewind left in the window through their codes only",
                 c.aged_early_tokens);
        text.add("kv_context_shifts_total", "counter", "Contexts that were full and dropped their middle", shifts_.load());
        text.add("kv_tokens_dropped_total", "counter", "Tokens that they dropped", dropped_.load());
        text.add("kv_tokens_recomputed_total", "counter", "Tokens behind those, which were computed again", computed_.load());
        text.add("kv_rows_saturated_total", "counter", "Rows of K or V beyond the range of their page's numbers", c.encoded.saturated);
        text.add("kv_nonfinite_total", "counter", "Elements of K or V that were no numbers", c.encoded.nonfinite);
        if (drift) {
            text.add("kv_verify_rows_total", "counter", "Rows of attention that were checked against exact K and V", drift->rows);
            text.add("kv_verify_error_sum", "counter", "Sum of their relative errors", drift->sum);
            text.add("kv_verify_error_max", "gauge", "The largest of them", drift->worst);
        }
        return text.take();
    }

private:
    const bool shift_;
    std::atomic<uint64_t> shifts_ = 0, dropped_ = 0, computed_ = 0;  // metrics() may be called by another thread
};

}  // namespace

server_kv_memory& serving(bool shift) {
    static Serving instance(shift);
    return instance;
}

}  // namespace crumb::llama
