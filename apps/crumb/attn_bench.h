// crumb attn-bench: one attention layer over its KV cache, ours and ggml's, in one process and on the same rows.
#pragma once

#include <crumb/attention.h>

#include <sys/mman.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace crumb::app::attn {

// Memory in large pages, as far as the system gives them: for K and V of all candidates alike.
template <class T>
struct LargePages {
    using value_type = T;
    LargePages() = default;
    template <class U>
    LargePages(const LargePages<U>&) {}
    static constexpr size_t kPage = 2 << 20;
    T* allocate(size_t n) {
        const size_t bytes = (n * sizeof(T) + kPage - 1) / kPage * kPage;
        void* p = std::aligned_alloc(kPage, bytes);
        if (!p) { throw std::bad_alloc(); }
        madvise(p, bytes, MADV_HUGEPAGE);
        return static_cast<T*>(p);
    }
    void deallocate(T* p, size_t) { std::free(p); }
    template <class U>
    bool operator==(const LargePages<U>&) const { return true; }
};
template <class T>
using LargeVector = std::vector<T, LargePages<T>>;

struct Shape {
    int n_head = 0, n_head_kv = 0, dim = 0;
    std::string name() const;
};

// What one layer keeps and asks: K and V rows [token][KV head][dim], Q rows [token][head][dim].
struct Rows {
    Shape shape;
    int tokens = 0;
    std::vector<float> k, v, q;
};

// Normal K and V; a token's length varies by a factor exp(0.3 n) for K and exp(0.5 n) for V, n normal.
Rows random_rows(const Shape& shape, int tokens);
// Of one layer of a model while it reads a text, repeated until there are enough tokens.
Rows record_rows(const std::filesystem::path& model, const std::filesystem::path& text, int layer, int tokens,
                 int n_threads);

// Queries are the last `n_rows` of `tokens` tokens; layers are copies in memory of their own, read in turn.
struct Task {
    const Rows* rows = nullptr;
    int tokens = 0, n_rows = 1;
    size_t bytes = 0;  // of K and V that all layers together should have, so that none stays in a cache
};

// Something that computes attention, as a candidate of the comparison.
class Candidate {
  public:
    virtual ~Candidate() = default;
    virtual double run(int n_threads) = 0;  // seconds a layer: the thread's CPU time, wall clock from 2 threads on
    virtual size_t bytes() const = 0;       // read a layer

    std::string name;
};

double seconds(int n_threads);  // the clock of run()

class Ours : public Candidate {
  public:
    Ours(const Task& task, const std::string& recipe, Isa isa);
    ~Ours() override;
    double run(int n_threads) override;
    size_t bytes() const override;

    // Relative to the length of the answer over the same pages in double precision, of the first layer.
    double error(int n_rows) const;
    double encode_seconds() const;  // a page

  private:
    struct State;
    std::unique_ptr<State> state_;
};

// ggml's operators on the same rows: "f16 FA", "f16 FA packed", "f16 no FA", and q8_0, q4_0 with FA. Packed: the tokens of
// a head are neighbours; otherwise the heads of a token are, as in llama.cpp.
std::vector<std::string> ggml_names();
std::unique_ptr<Candidate> ggml_candidate(const Task& task, const std::string& name);

// Of this machine: bytes a second read from memory, and multiply-adds a second of the dot product of `isa`.
double read_roof(int n_threads);
double dot_roof(Isa isa);

}  // namespace crumb::app::attn
