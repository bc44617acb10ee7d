// crumb depth-bench: tokens a second behind a context of every depth, from one prompt that grows, where `crumb bench` computes a
// prompt a depth; and of many sequences of the greatest depth, each with its own copy of the state of the first. By the median
// step: graphs that are recorded anew and other programs take some steps longer. Tokens are random: speed alone.
#include "command_line.h"
#include "commands.h"
#include "session.h"

#include <crumb/error.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <random>
#include <thread>

namespace crumb::app {

namespace {

struct Options {
    std::filesystem::path model;
    std::vector<int> depths = {0, 2048, 8192};
    std::vector<int> sequences;
    int generated = 32, prompt = 512, rounds = 2, ubatch = 2048, room = 0, gpu_layers = -1, threads = 0;
    bool shared = false, cpu_cache = false;
    std::string stock = "f16";
};

constexpr int kWarmSteps = 8;  // graphs are recorded in them

// Tokens that a depth adds to the prompt while it is timed.
int timed(const Options& o) { return kWarmSteps + o.generated + (o.prompt > 0 ? o.rounds + 1 : 0) * o.prompt; }

void require_room_between_depths(const Options& o) {
    for (size_t i = 1; i < o.depths.size(); ++i) {
        if (o.depths[i] - o.depths[i - 1] < timed(o)) {
            fail("what is timed behind {} tokens takes {} more, so the next depth cannot be {}: take one from {} on, or fewer tokens with -n, -p, -r{}",
                 o.depths[i - 1], timed(o), o.depths[i], o.depths[i - 1] + timed(o), o.prompt > 0 ? " (-p 0: no prompts)" : "");
        }
    }
}

int most_sequences(const Options& o) { return o.sequences.empty() ? 1 : o.sequences.back(); }

// Tokens that each has room for.
int64_t longest_sequence(const Options& o) {
    const int64_t steps = int64_t(o.generated + kWarmSteps) * int64_t(std::max<size_t>(1, o.sequences.size()));
    return std::max<int64_t>(o.depths.back() + steps + timed(o), o.room);
}

void require_context(const Options& o) {
    constexpr int64_t kMost = int64_t(1) << 31;
    if (const int64_t tokens = (longest_sequence(o) + 256) * most_sequences(o); tokens > kMost) {
        fail("{} sequences of {} tokens are {} together, and llama.cpp counts to {}: lower -s, -d or --room", most_sequences(o), longest_sequence(o),
             tokens, kMost);
    }
}

class Bench {
public:
    Bench(const Options& o, const std::optional<llama::KvOptions>& kv) : o_(o) {
        if (!std::filesystem::exists(o.model)) { fail("there is no model file {}", o.model.string()); }
        llama_backend_init();
        llama::use_kv(kv);
        auto model = llama_model_default_params();
        model.n_gpu_layers = o.gpu_layers;
        model_.reset(llama_model_load_from_file(o.model.c_str(), model));
        if (!model_) { fail("{} is not a GGUF model that llama.cpp can load (its message is above)", o.model.string()); }
        n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));

        const int most = most_sequences(o);
        const int64_t longest = longest_sequence(o);
        auto context = llama_context_default_params();
        context.n_ctx = uint32_t((longest + 255) / 256 * 256 * most);  // require_context() has looked
        context.n_batch = context.n_ubatch = uint32_t(std::max({o.ubatch, o.prompt, most}));
        context.n_seq_max = uint32_t(most);
        context.n_threads = context.n_threads_batch = o.threads > 0 ? o.threads : int(std::max(1u, std::thread::hardware_concurrency()));
        context.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        context.offload_kqv = !o.cpu_cache;
        if (!kv) { context.type_k = context.type_v = o.stock == "q8_0" ? GGML_TYPE_Q8_0 : o.stock == "q4_0" ? GGML_TYPE_Q4_0 : GGML_TYPE_F16; }
        context.no_perf = true;
        context_.reset(llama_init_from_model(model_.get(), context));
        if (!context_) {
            const auto why = llama::last_refusal();
            fail("{}", kv && !why.empty() ? why : fmt::format("llama.cpp has no memory for {} sequences of {} tokens (its message is above)", most, longest));
        }
        positions_.resize(size_t(most));
        step(1, kWarmSteps);
        if (o.prompt > 0) { prompt(o.prompt); }
        clear(0);
    }

    void run() {
        for (const int depth : o_.depths) {
            while (positions_[0] < depth) { prompt(std::min(o_.ubatch, depth - positions_[0])); }
            step(1, kWarmSteps);
            report("tg", depth, 1, 1, step(1, o_.generated));
            if (depth == o_.depths.back()) { copies_at(depth); }
            if (o_.prompt == 0) { continue; }
            prompt(o_.prompt);
            std::vector<double> seconds;
            for (int i = 0; i < o_.rounds; ++i) { seconds.push_back(prompt(o_.prompt)); }
            report("pp", depth, 1, o_.prompt, seconds);
        }
    }

private:
    llama_memory_t memory() const { return llama_get_memory(context_.get()); }

    void clear(int sequence) {
        llama_memory_seq_rm(memory(), sequence, -1, -1);
        positions_[size_t(sequence)] = 0;
    }

    // `tokens` of a step.
    void report(const char* test, int depth, int sequences, int tokens, std::vector<double> seconds) const {
        std::ranges::sort(seconds);
        const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / double(seconds.size());
        std::printf("{\"test\": \"%s\", \"depth\": %d, \"sequences\": %d, \"steps\": %zu, \"tokens_per_second\": %.2f, \"by_mean_step\": %.2f}\n", test,
                    depth, sequences, seconds.size(), tokens / seconds[seconds.size() / 2], tokens / mean);
        std::fflush(stdout);
    }

    // Seconds that it takes.
    double decode(const llama_batch& batch) {
        const auto start = std::chrono::steady_clock::now();
        if (const int status = llama_decode(context_.get(), batch); status != 0) {
            fail("llama.cpp could not process {} tokens (status {}); {}", batch.n_tokens, status, llama::last_refusal());
        }
        llama_synchronize(context_.get());
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

    llama_token token() { return llama_token(random_() % unsigned(n_vocab_)); }

    double prompt(int n) {
        std::vector<llama_token> tokens(static_cast<size_t>(n));
        std::ranges::generate(tokens, [&] { return token(); });
        positions_[0] += n;
        return decode(llama_batch_get_one(tokens.data(), n));
    }

    // `steps` tokens of each of the first `n` sequences; seconds of each step.
    std::vector<double> step(int n, int steps) {
        std::vector<double> seconds;
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int i = 0; i < steps; ++i) {
            for (int s = 0; s < n; ++s) {
                batch.token[s] = token(), batch.pos[s] = positions_[size_t(s)]++;
                batch.n_seq_id[s] = 1, batch.seq_id[s][0] = s, batch.logits[s] = true;
            }
            seconds.push_back(decode(batch));
        }
        llama_batch_free(batch);
        return seconds;
    }

    void copies_at(int depth) {
        if (o_.sequences.empty()) { return; }
        std::vector<uint8_t> state;
        if (!o_.shared) {
            state.resize(llama_state_seq_get_size(context_.get(), 0));
            state.resize(llama_state_seq_get_data(context_.get(), state.data(), state.size(), 0));
        }
        int made = 1;
        for (const int n : o_.sequences) {
            for (; made < n; ++made) {
                if (o_.shared) {
                    llama_memory_seq_cp(memory(), 0, made, -1, -1);
                } else if (llama_state_seq_set_data(context_.get(), state.data(), state.size(), made) == 0) {
                    fail("the state of {} tokens could not be copied to sequence {}; {}", positions_[0], made, llama::last_refusal());
                }
                positions_[size_t(made)] = llama_memory_seq_pos_max(memory(), made) + 1;
            }
            step(n, kWarmSteps);
            report("tg", depth, n, n, step(n, o_.generated));
        }
    }

    Options o_;
    llama::ModelPtr model_;
    llama::ContextPtr context_;
    int n_vocab_ = 0;
    std::vector<int> positions_;  // by sequence: tokens in it
    std::mt19937 random_{1};
};

}  // namespace

int depth_bench(int argc, char** argv) {
    const KvArguments arguments = take_kv_arguments(argc, argv);
    Options o;
    CLI::App app{"Tokens a second at every depth of one prompt that grows, and of many sequences of the greatest one", "crumb depth-bench"};
    app.footer(kKvHelp);
    app.add_option("-m,--model", o.model, "GGUF model")->required();
    app.add_option("-d,--depths", o.depths, "tokens before what is timed, ascending")->delimiter(',')->capture_default_str()->check(CLI::Range(0, 1 << 24));
    app.add_option("-n,--predict", o.generated, "tokens of a sequence that are timed, one by one")->capture_default_str()->check(CLI::Range(1, 1 << 16));
    app.add_option("-p,--prompt", o.prompt, "tokens of a prompt that are timed together (0: none)")->capture_default_str()->check(CLI::Range(0, 1 << 16));
    app.add_option("-r,--rounds", o.rounds, "so many prompts")->capture_default_str()->check(CLI::Range(1, 1000));
    app.add_option("-s,--sequences", o.sequences, "also so many sequences at once, ascending, at the greatest depth")->delimiter(',')->check(CLI::Range(1, 1 << 12));
    app.add_option("--room", o.room, "tokens that a sequence has room for, if that is more: what fits, without a long prompt")->check(CLI::Range(0, 1 << 24));
    app.add_flag("--shared", o.shared, "sequences share what they begin with: forks instead of copies");
    app.add_option("--ubatch-size", o.ubatch, "tokens of a step on the way to a depth")->capture_default_str()->check(CLI::Range(1, 1 << 16));
    app.add_option("--gpu-layers", o.gpu_layers, "layers on the GPU (-1: all)")->capture_default_str();
    app.add_flag("--no-kv-offload", o.cpu_cache, "cache and attention on the CPU");
    app.add_option("--cache-type", o.stock, "of llama.cpp's own cache, without --kv")->capture_default_str()->check(CLI::IsMember({"f16", "q8_0", "q4_0"}));
    add_threads(app, o.threads);
    if (const auto status = parse(app, arguments.rest)) { return *status; }
    if (!std::ranges::is_sorted(o.depths) || !std::ranges::is_sorted(o.sequences)) { fail("depths and numbers of sequences must ascend"); }
    require_room_between_depths(o);
    require_context(o);
    llama::quiet_log();
    Bench(o, arguments.kv).run();
    return 0;
}

}  // namespace crumb::app
