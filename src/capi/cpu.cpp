// The C API on the CPU.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "capi/layer.h"

namespace crumb::capi {

namespace {

static_assert(sizeof(crumb_row) == sizeof(QueryRow) && offsetof(crumb_row, end) == offsetof(QueryRow, end));

PageFormat exact_format(const crumb_layer& layer) { return bf16_format(layer.format.k.dim, layer.format.v.dim); }

// Calls body(i) for each i < n.
template <class Body>
void run(const crumb_threads* threads, int n, const Body& body) {
    if (!threads || n == 1) {
        for (int i = 0; i < n; i++) body(i);
        return;
    }
    threads->run(threads->context, n, [](void* work, int i) { (*static_cast<const Body*>(work))(i); },
                 const_cast<Body*>(&body));
}

// Whether a row sees tokens of its table's blocks alone, and blocks that there are: the kernels take both for granted.
void check_blocks(const crumb_step& step, size_t i, const crumb_row& row) {
    if (row.begin < 0 || row.end < 0 || size_t(row.end) > kPageTokens * step.ids_stride) {
        fail("row {} sees tokens {} to {} of {} blocks of {}", i, row.begin, row.end, step.ids_stride, kPageTokens);
    }
    const size_t ids = row.sequence * step.ids_stride;
    for (int first = row.begin, last; first < row.end; first = last) {
        const int block = first / kPageTokens;
        last = std::min(row.end, (block + 1) * kPageTokens);
        const int coded = std::max(0, std::min(last, row.coded_end) - std::max(first, step.sink));
        for (const auto& [tokens, table, kind] : {std::tuple{coded, step.coded_ids, "coded"}, {last - first - coded, step.exact_ids, "exact"}}) {
            if (tokens > 0 && table[ids + block] == CRUMB_NO_BLOCK) {
                fail("row {} reads tokens {} to {} in {} block {} of its sequence, which has none (CRUMB_NO_BLOCK)", i, first, last, kind, block);
            }
        }
    }
}

void attend_step(const crumb_layer& layer, const crumb_step& step, const crumb_io& io, void*) {
    std::vector<QueryRow> rows;
    for (size_t i = 0; i < size_t(step.n_tiles) * step.rows_per_tile; i++) {
        const crumb_row& row = step.rows[i];
        if (row.token == CRUMB_NO_TOKEN) continue;
        if (row.sequence >= step.n_sequences) fail("row {} is of sequence {} of {}", i, row.sequence, step.n_sequences);
        check_blocks(step, i, row);
        rows.push_back({row.sequence, row.token, row.position, row.begin, row.coded_end, row.end});
    }
    std::vector<SequenceView> views;
    for (size_t s = 0; s < step.n_sequences; s++) {
        const auto table = [&](const void* base, size_t stride, const uint32_t* ids) {
            return BlockTable{static_cast<const std::byte*>(base), stride, {ids + s * step.ids_stride, step.ids_stride}};
        };
        views.push_back({table(io.coded, io.coded_stride, step.coded_ids), table(io.exact, io.exact_stride, step.exact_ids)});
    }
    AttentionLayer attention;
    attention.n_head = layer.n_head, attention.n_head_kv = layer.n_head_kv;
    attention.format = layer.format, attention.tables = layer.tables, attention.maps = &layer.maps;
    attention.scale = layer.scale, attention.softcap = layer.softcap, attention.sinks = io.sinks;

    const AttentionPlan plan(std::move(rows), step.sink);
    const AttentionIo where = {io.q, io.q_token_stride, io.q_head_stride, io.out, io.out_stride};
    const int n_threads = step.threads ? step.threads->n : 1;
    AttentionWork work;
    work.prepare(plan, layer.n_head, layer.n_head_kv, layer.format, n_threads);
    run(step.threads, n_threads, [&](int t) noexcept { attend(best_isa(), attention, plan, views, where, work, t, n_threads); });
}

void store(const crumb_layer& layer, const crumb_rows& rows, void*) {
    const PageFormat format = exact_format(layer);
    const size_t dim_k = format.k.dim, dim_v = format.v.dim;
    for (size_t i = 0; i < size_t(rows.n_tokens) * layer.n_head_kv; i++) {
        const size_t token = i / layer.n_head_kv, head = i % layer.n_head_kv;
        std::byte* record = static_cast<std::byte*>(rows.exact) + rows.blocks[token] * rows.exact_stride + head * format.bytes();
        const int slot = int(rows.slots[token] % kPageTokens);
        set_key(format, record, slot, {reinterpret_cast<const bf16*>(rows.k) + i * dim_k, dim_k});
        set_value(format, record, slot, {reinterpret_cast<const bf16*>(rows.v) + i * dim_v, dim_v});
    }
}

void encode(const crumb_layer& layer, const crumb_encode_batch& batch, void*) {
    const PageFormat exact = exact_format(layer);
    const size_t dim_k = exact.k.dim, dim_v = exact.v.dim;
    for (int j = 0; j < batch.n_jobs; j++) {
        const int keep = batch.jobs[j].keep;
        if (keep < 0 || keep > kPageTokens) fail("job {} keeps {} of {} tokens", j, keep, kPageTokens);
    }
    std::vector<EncodeCounts> counts(size_t(batch.n_jobs) * layer.n_head_kv);
    run(batch.threads, int(counts.size()), [&](int i) noexcept {
        const crumb_encode_job& job = batch.jobs[i / layer.n_head_kv];
        const size_t head = size_t(i % layer.n_head_kv);
        const std::byte* record =
            static_cast<const std::byte*>(batch.exact) + job.source * batch.exact_stride + head * exact.bytes();
        std::vector<bf16> k(kPageTokens * dim_k), v(kPageTokens * dim_v);
        for (int t = 0; t < kPageTokens; t++) {
            for (size_t c = 0; c < dim_k; c++) k[t * dim_k + c] = key_at(exact, record, t, int(c));
            for (size_t c = 0; c < dim_v; c++) v[t * dim_v + c] = value_at(exact, record, t, int(c));
        }
        const auto page = [&](uint32_t id) {
            return static_cast<std::byte*>(batch.coded) + id * batch.coded_stride + head * layer.format.bytes();
        };
        counts[i] = encode_page(layer.recipe, layer.format, layer.tables[head], k, v, page(job.target), job.keep,
                                job.keep > 0 ? page(job.kept) : nullptr);
    });
    for (const EncodeCounts& of_page : counts) {
        batch.counts->nonfinite += uint32_t(of_page.nonfinite);
        batch.counts->saturated += uint32_t(of_page.saturated);
    }
}

void copy(size_t bytes, std::byte* to, size_t to_stride, const uint32_t* to_ids, const std::byte* from, size_t from_stride,
          const uint32_t* from_ids, size_t n, void*) {
    for (size_t i = 0; i < n; i++) std::memmove(to + to_ids[i] * to_stride, from + from_ids[i] * from_stride, bytes);
}

}  // namespace

const Backend cpu_backend = {
    .workspace_bytes = [](const crumb_layer&, const crumb_step&, size_t& bytes) { bytes = 0; },
    .plan = [](const crumb_layer&, const crumb_step&, void*) {},
    .attend = attend_step,
    .store = store,
    .encode = encode,
    .copy = copy,
};

}  // namespace crumb::capi
