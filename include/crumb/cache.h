// The KV cache of all sequences of one model: pools of blocks, sequences as lists of blocks, windows, fork and crop.
//
// A block is 64 tokens, aligned at 0, of all KV heads of a layer. Block ids are the same in all layers of a kind, so a
// sequence has one table, not one a layer. Three pools, each a slab a layer, sized when the cache is made; nothing else
// grows with the context:
//   coded    pages of the recipe, layers that see everything, and sliding-window layers in the form `pages`
//   exact    BF16 records of the same layers: sinks and the recent tokens
//   window   records of the other sliding-window layers: BF16, or rows of 8 bits
//
// Recipes with pages of 128 tokens have coded blocks of 128, encoded when their first half is due; they need 64 recent
// tokens at least.
//
// Life of a token: its K and V become BF16 rows of an exact block. When all 64 tokens of a block are older than
// edge(t) = 64 floor(max(0, t + 1 - recent) / 64) of the newest token t, the block is demoted: encoded into a coded
// block. The exact block is freed when no query can want it any more. Sinks keep theirs.
//
// Forked sequences share blocks by reference count; who writes to a shared block first gets a copy. A crop by a few tokens
// loses nothing. A deeper one moves the window back over tokens that exist only as codes ("aged early"): they are read
// through their codes, counted, and keep them when their block is demoted again, so that codes never drift.
//
// Blocks of sequences that reuse() was called for are found again by the tokens up to them, also after their sequence is
// gone and as long as nobody needs their place. So sequences that begin with the same tokens share what is the same.
#pragma once

#include <crumb/attention.h>
#include <crumb/recipe.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace crumb {

enum class PrefillRule : uint8_t {
    position,  // what a query sees depends on positions alone
    exact,     // the papers': tokens of the same chunk, and the window of the chunk's first token, are exact
};

// From where a sequence may begin that shares tokens with others.
enum class ReuseRule : uint8_t {
    exact,  // where codes and the exact rows of the window are there: what follows is what a cold sequence computes
    codes,  // also where the window is known through its codes only, if `recent` tokens are left to compute
};

// edge(t) of the position rule.
int32_t coded_edge(int32_t position, int recent);

// How a sliding-window layer is kept.
enum class SlidingForm : uint8_t {
    bf16,   // rows of its window
    q8,     // the same in 8 bits by the range of a token: a token is coded as it comes, and read through its code always
    pages,  // as layers that see everything: pages of all tokens, sinks and recent ones exact
};
inline constexpr SlidingForm kSlidingForms[] = {SlidingForm::bf16, SlidingForm::q8, SlidingForm::pages};
std::string_view name(SlidingForm form);

struct CacheLayer {
    int n_head_kv = 0;
    int dim_k = 0;
    int dim_v = 0;
    int window = 0;      // tokens that a query sees, itself included; 0: all
    bool stores = true;  // false: the layer reads another layer's K and V, or has none
    SlidingForm form = SlidingForm::bf16;  // if it has a window

    bool coded() const { return stores && (window == 0 || form == SlidingForm::pages); }
    bool windowed() const { return stores && !coded(); }  // its window is all that is kept
    bool has_codes() const { return coded() || (windowed() && form == SlidingForm::q8); }
};

// Memory of a device, for the blocks of layers that attend there. Pointers are the device's. Calls come between steps, see
// all that was queued on the device before them, and return when they are done; those that fail throw Error.
class DeviceMemory {
public:
    virtual ~DeviceMemory() = default;
    // Zeros. The last `on_host` of the bytes, as far as the device maps memory so finely, are main memory that it reads and
    // writes over its bus.
    virtual std::byte* allocate(size_t bytes, size_t on_host = 0) = 0;
    virtual void free(std::byte* memory) = 0;
    virtual void copy(std::byte* to, const std::byte* from, size_t bytes) = 0;
    virtual void clear(std::byte* to, size_t bytes) = 0;
    virtual void read(void* to, const std::byte* from, size_t bytes) = 0;         // to main memory
    virtual void write(std::byte* to, const void* from, size_t bytes) = 0;        // from main memory
};

struct CacheConfig {
    Recipe recipe;
    std::vector<CacheLayer> layers;                  // by model layer
    std::vector<PageFormat> formats;                 // by model layer: pages of layers with codes, which may differ
    std::vector<std::vector<HeadTables>> tables;     // by model layer; empty for layers without codes
    std::vector<DeviceMemory*> devices;              // by model layer, null: main memory; empty: all of them there
    int chunk_rows = 0;  // of a step of a device: a sequence with so many rows or more is a chunk (StepLayout); 0: none is
    int sink = 64;
    int recent = 256;
    PrefillRule prefill = PrefillRule::position;
    int n_sequences = 1;
    int64_t tokens_per_sequence = 0;  // the longest that one sequence can become
    int64_t tokens_total = 0;         // of all sequences together; at least tokens_per_sequence
    size_t memory = 0;                // bytes of all pools; 0: what tokens_total asks for
    size_t host_memory = 0;           // bytes of the pages of devices' layers that lie in main memory, at most
    int max_step_tokens = 512;        // appends of one step (ubatch)
    ReuseRule reuse = ReuseRule::exact;
    int spare_windows = 0;            // windows of prefixes that may be kept beside those of sequences
    std::string artefact_hash;        // part of the identity of saved states
    std::string model_hash;
};

// Fill in `formats`, and `tables` after it, for the recipe and layers of `config`. They throw as page_formats() and
// layer_tables() do.
void set_formats(CacheConfig& config, const Artefact* artefact);
void set_tables(CacheConfig& config, const Artefact* artefact);

// What all sliding-window layers take in this form, with room for tokens_total; nullopt if the recipe has no pages for them:
// those of an artefact are calibrated for layers that see everything, and those of `bf16` save nothing. Throws as shape and
// formats do.
std::optional<size_t> sliding_bytes(const CacheConfig& config, SlidingForm form);
// All of them get this form and its formats; those of other layers stay. Throws Error for one that the recipe does not have.
void set_sliding_form(CacheConfig& config, SlidingForm form);
std::optional<SlidingForm> sliding_form(const CacheConfig& config);  // nullopt: the model has no such layers

// What a cache of this configuration allocates, by the page formats alone (no tables): what `inspect` prints and what Cache takes.
struct CacheBytes {
    size_t coded = 0;
    size_t exact = 0;   // sinks and recent windows
    size_t window = 0;  // sliding-window layers
    size_t total() const { return coded + exact + window; }
    int64_t tokens = 0;               // capacity: of all sequences together
    size_t bf16_equivalent = 0;       // 16-bit K and V of the same capacity (sliding-window layers: their window)
    double bits_per_element = 0;      // pages of coded layers, without windows
    double effective_bits = 0;        // total() over the elements of the capacity
};
CacheBytes cache_bytes(const CacheConfig& config);
std::vector<size_t> layer_bytes(const CacheConfig& config);  // the same by model layer
std::vector<size_t> host_bytes(const CacheConfig& config);   // of these, what host_memory moves to main memory

struct CacheCounters {
    EncodeCounts encoded;
    uint64_t demoted_blocks = 0;
    uint64_t aged_early_tokens = 0;  // tokens that a crop left readable through their codes only
    uint64_t shared_blocks = 0;      // now, coded, by more than one sequence
    uint64_t blocks_in_use = 0;      // now, coded
    uint64_t blocks_total = 0;       // coded
    uint64_t host_blocks_in_use = 0;  // now, coded: those that a device reads from main memory
    size_t bytes_in_use = 0;        // now, of all pools
    uint64_t exact_blocks_in_use = 0;   // now
    uint64_t window_blocks_in_use = 0;  // now
    uint64_t kept_blocks = 0;    // now, coded, of no sequence: found by their tokens, evicted when their place is needed
    uint64_t evicted_blocks = 0;  // coded
    uint64_t found_tokens = 0;    // that a sequence began with by reuse() and did not have before
};

// What a sequence holds now, in blocks of 64 tokens (coded ones: pages). The shared ones come first.
struct SequenceStatus {
    int32_t length = 0;
    int64_t sinks = 0;   // exact, below the codes
    int64_t coded = 0;
    int64_t shared = 0;  // of the coded ones, those that other sequences hold too
    int64_t recent = 0;  // exact
    int64_t window = 0;  // of sliding-window layers
    size_t bytes = 0;          // of all of these, shared or not
    size_t bytes_at_16_bit = 0;  // of the same tokens
};

// A token of a step: it is appended to `sequence`, K and V rows are found by `token`.
struct Append {
    uint32_t sequence = 0;
    uint32_t token = 0;
    bool attends = true;  // false: stored, but no row of attention (a token of several sequences attends in one of them)
    int32_t id = -1;      // what the token is, for reuse(); negative: not known, and nothing from here on is found again
};

// Rows of a step's K or V in one layer: row of head h of token i is at data + i * token_stride + h * head_stride.
struct RowSource {
    const float* data = nullptr;
    size_t token_stride = 0;
    size_t head_stride = 0;
};

// A step as a device reads it: arrays in one piece of memory, in words of 32 bits. What it holds changes with every step, a
// layout only with the numbers of things in it, so a device can replay a recorded step as long as the layout is the same.
struct StepLayout {
    int n_tiles = 0;        // of query rows, each of one sequence
    int rows_per_tile = 1;  // 1, 2, 4 or 8
    int n_chunks = 0;       // sequences with CacheConfig::chunk_rows rows or more, which are not in tiles
    int rows_per_chunk = 0;
    int chunk_blocks = 0;   // that a chunk reads at most, exactly or through codes
    int n_stores = 0;       // rows of K and V that are written
    int n_jobs = 0;         // pages that are encoded, or less: the others have no source and come last
    bool encodes_first = false;  // none of the pages has a row of this step, so all layers' can be encoded before it
    int n_sequences = 0;
    size_t ids_stride = 0;  // block ids of a sequence
    // By distinct window: QueryRow [n_tiles][rows_per_tile], [n_chunks][rows_per_chunk]; token 0xffffffff: none.
    std::vector<size_t> rows, chunk_rows;
    size_t stores = 0, window_stores = 0;   // StoreRow [n_stores], into exact blocks and sliding-window blocks
    size_t jobs = 0;                        // EncodeBlock [n_jobs]
    size_t coded_ids = 0, exact_ids = 0, window_ids = 0;  // [n_sequences][ids_stride]
    size_t words = 0;
    bool operator==(const StepLayout&) const = default;
};

struct StoreRow {
    uint32_t token;  // of the step
    uint32_t block;  // kNoBlock: nothing to do
    uint32_t row;
};
struct EncodeBlock {
    uint32_t source = kNoBlock;  // exact block; kNoBlock: nothing to do
    uint32_t target = kNoBlock;  // coded block
    int32_t keep = 0;            // rows below are taken over from coded block `kept`
    uint32_t kept = kNoBlock;
};

// Without a step: what one of `n_tokens` tokens of `n_sequences` sequences can have at most.
StepLayout largest_layout(const CacheConfig& config, int n_tokens, int n_sequences);

// All calls come from one thread, except store(), plan() and views().
class Cache {
public:
    // Allocates everything. Throws Error (unsupported sizes, no memory, contradictory settings).
    explicit Cache(CacheConfig config);
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    const CacheConfig& config() const;
    CacheBytes bytes() const;         // of what is allocated
    CacheCounters counters() const;

    int32_t length(uint32_t sequence) const;
    SequenceStatus status(uint32_t sequence) const;
    std::span<const int32_t> ids(uint32_t sequence) const;  // of its tokens, negative where they are not known
    // The lowest position to which the sequence can be cropped without losing a sliding window; 0 if there is none.
    int32_t lowest_crop(uint32_t sequence) const;

    // Removes tokens from position `length` on, if there are any. Always succeeds at lowest_crop() or above, and at 0;
    // false otherwise, and then nothing changed. A step that was abandoned before all its stores returned is undone by
    // cropping each of its sequences to the length before it; nothing else may be called in between.
    bool crop(uint32_t sequence, int32_t length);
    // Makes `to` a copy of the first `length` tokens of `from`; what `to` held is dropped. False as crop().
    bool fork(uint32_t from, uint32_t to, int32_t length);

    // Makes the sequence hold the longest start of the tokens `ids` that can be had, its own first `own` tokens or named
    // blocks, and at most all but one; returns its length. From then on its blocks are found by others, as long as it
    // grows by tokens with ids and is not cropped to 0. `salt`: what else decides K and V (adapters); sequences of
    // different salts share nothing. `common`: others are likely to begin with this many of the tokens too (a system
    // prompt), so what they would want of a window is kept there. To be called between steps.
    int32_t reuse(uint32_t sequence, std::span<const int32_t> ids, int32_t own, uint64_t salt = 0, int32_t common = 0);

    // How many of its own first `own` tokens the sequence can keep for a prompt of n_tokens by the reuse rule: all, or
    // those that leave a window to compute, or none. reuse() does no less. For those who crop themselves.
    int32_t keep(uint32_t sequence, int32_t own, int32_t n_tokens) const;

    // Says that this prompt will be given to the sequence: what others compute until then is kept for it where they part.
    // Forgotten with reuse(), and by announcing nothing.
    void announce(uint32_t sequence, std::span<const int32_t> ids);

    // Whether these tokens can be appended, in one step or in several: lengths and free blocks. Nothing changes.
    bool fits(std::span<const Append> appends) const;

    // Room for sequences of which not all can become their longest at once. capacity(): tokens of all sequences
    // together. room(): the length that this one can be promised now, if it may give up what only it holds. promise():
    // false, and nothing is promised, if `tokens` are more; otherwise it can become that long, or its longest if that is
    // less, whatever the others do that keep to has_room(). has_room(): whether this one can grow by `tokens` and every promise can still be kept.
    int64_t capacity() const;
    int64_t room(uint32_t sequence) const;
    // longest_promise(): what could be promised if there were no other sequences.
    bool promise(uint32_t sequence, int64_t tokens);
    int64_t longest_promise() const;
    void end_promise(uint32_t sequence);
    bool has_room(uint32_t sequence, int32_t tokens) const;

    // Begins a step: appends tokens, all or nothing (false: does not fit), and makes the step's plans. At most
    // max_step_tokens appends. Tokens of one sequence are in ascending order. `causal` false: rows see all tokens of
    // their sequence after the step.
    bool begin(std::span<const Append> appends, bool causal = true);

    // Stores K and V of the step's tokens in a layer and encodes what is due. Called by each of n threads; attention may
    // start when all have returned. Layers without `stores` are not passed here.
    void store(int layer, RowSource k, RowSource v, int thread, int n_threads);

    // Rows and views of the step for attention in this layer (the one that stores, for a layer that reads another's). One
    // view a sequence; what a view says is good until the next call that is not const.
    const AttentionPlan& plan(int layer) const;
    std::span<const SequenceView> views(int layer) const;

    // The step for layers in the memory of a device, where store() and attention are the caller's. Pages of 64 tokens only.
    StepLayout step_layout() const;
    void write_step(const StepLayout& layout, std::span<uint32_t> words) const;
    size_t plan_index(int layer) const;            // into StepLayout::rows
    std::byte* coded_base(int layer) const;      // block 0, in the memory of the layer; null where there are none
    std::byte* exact_base(int layer) const;      // of a sliding-window layer: its BF16 blocks

    // One sequence as bytes: header (version, identity of configuration and model), block records with checksums.
    // restore() parses and checks everything before it replaces what was there; throws Error and changes nothing
    // otherwise. `windows_only`: the sliding-window layers alone (a checkpoint that completes a cropped sequence).
    using Write = std::function<void(const void*, size_t)>;
    using Read = std::function<void(void*, size_t)>;
    void save(uint32_t sequence, const Write& write, bool windows_only = false) const;
    void restore(uint32_t sequence, const Read& read, bool windows_only = false);
    // The ids of the tokens of a saved sequence; reads what lies before its blocks. Throws as restore() does.
    std::vector<int32_t> saved_ids(const Read& read) const;

    struct State;

private:
    std::unique_ptr<State> state_;
};

}  // namespace crumb
