// Decode attention on a GPU, L2 cold, timed in CUDA graphs: layers of disjoint pages, windows and tables, 300 MB of them or
// more (4 GB take as long), the block tables shared as the layers of a model share theirs; median of 15 replays after 20 ms of
// warm-up. The read roof is measured in the same run, and sequence 0 is held against double precision (up to 8k tokens) or the
// CPU's kernels. JSON lines on standard output, a table on standard error.
//
// "us" is attention of a layer with both maps, that is three kernels; "pages_us", "query_us" and "output_us" are runs of one
// of them alone; "roof" is the share of the read roof that the bytes of pages and windows have in pages_us.
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "cuda/gpu_machine.h"
#include "cuda_fill.h"
#include "recipe/cuda/launch.h"

namespace crumb::cuda {

namespace {

constexpr int kSink = 64, kRecent = 256;

struct Shape {
    int n_head, n_head_kv;
    std::vector<int> contexts;  // of the sequences
    const char* name = "";

    Shape(int heads, int kv, int batch, int context) : n_head(heads), n_head_kv(kv), contexts(size_t(batch), context) {}
    int batch() const { return int(contexts.size()); }
};

// 128 requests of 100 to 30000 tokens, evenly spread in their logarithms.
Shape ragged() {
    Shape shape(32, 8, 128, 0);
    for (int i = 0; i < 128; i++) shape.contexts[size_t(i)] = int(100 * std::pow(300.0, (i * 37 % 128) / 127.0));
    shape.name = "ragged";
    return shape;
}

double median_us(int launches, const std::function<void(cudaStream_t, int)>& launch) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t start, end;
    require(cudaStreamCreate(&stream), "stream");
    cudaEventCreate(&start), cudaEventCreate(&end);
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < launches; i++) launch(stream, i);
    require(cudaStreamEndCapture(stream, &graph), "end of capture");
    require(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    const auto once = [&] {
        float ms = 0;
        cudaEventRecord(start, stream);
        require(cudaGraphLaunch(exec, stream), "replay");
        cudaEventRecord(end, stream);
        require(cudaStreamSynchronize(stream), "kernels");
        cudaEventElapsedTime(&ms, start, end);
        return double(ms);
    };
    for (double spent = 0; spent < 20;) spent += once();
    std::vector<double> times;
    for (int i = 0; i < 15; i++) times.push_back(once());
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
    cudaEventDestroy(start), cudaEventDestroy(end);
    return times[times.size() / 2] * 1000 / launches;
}

std::vector<HeadTables> random_tables(const PageFormat& format, int n_head_kv) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto side = [&](const SideFormat& f) {
        SideTables t;
        t.format = f;
        t.decode.resize(size_t(f.planes) * f.dim);
        for (float& x : t.decode) x = normal(random) / std::sqrt(float(f.planes));
        if (f.info == SideInfo::scale_zero) t.ones.assign(f.dim, 0.3f);
        if (f.mean) t.mean_step.assign(f.dim, 0.001f);
        return t;
    };
    std::vector<HeadTables> heads;
    for (int h = 0; h < n_head_kv; h++) {
        heads.push_back({side(format.k), side(format.v)});
        if (format.planar()) continue;
        for (SideTables* t : {&heads.back().k, &heads.back().v}) {  // plane p codes direction p
            t->direction.resize(size_t(t->format.planes)), t->digit.assign(t->direction.size(), 0), t->digits.assign(size_t(t->format.dim), 1);
            std::iota(t->direction.begin(), t->direction.end(), 0);
        }
    }
    return heads;
}

// Error of a row of sequence 0, of its norm: against double precision where that takes no minutes, else the CPU's kernels.
double check(const PageFormat& format, const Shape& shape, std::span<const HeadTables> tables, const LayerData& data,
             const std::vector<u32>& coded_ids, const std::vector<u32>& exact_ids, const QueryRow& row, const std::vector<float>& q,
             GpuMachine& machine) {
    std::vector<u32> dense(coded_ids.size());
    std::iota(dense.begin(), dense.end(), 0);
    const auto fetch = [&](const std::byte* base, size_t stride, const std::vector<u32>& ids) {
        std::vector<std::byte> bytes(ids.size() * stride);
        for (size_t i = 0; i < ids.size(); i++) machine.download(&bytes[i * stride], base + ids[i] * stride, stride);
        return bytes;
    };
    const std::vector<std::byte> coded = fetch(data.coded, data.coded_stride, coded_ids);
    // Blocks behind the sinks and before the window have no exact rows.
    std::vector<u32> exact_dense(exact_ids.size(), kNoBlock), present;
    for (size_t i = 0; i < exact_ids.size(); i++) {
        if (exact_ids[i] == kNoBlock) continue;
        exact_dense[i] = u32(present.size());
        present.push_back(exact_ids[i]);
    }
    const std::vector<std::byte> exact = fetch(data.exact, data.exact_stride, present);
    AttentionLayer layer;
    layer.n_head = shape.n_head, layer.n_head_kv = shape.n_head_kv, layer.format = format, layer.tables = tables;
    AttentionMaps maps = attention_maps(tables);
    maps.query_bits = 15;
    layer.maps = &maps;
    layer.scale = data.scale;
    const SequenceView view = {{coded.data(), data.coded_stride, dense}, {exact.data(), data.exact_stride, exact_dense}};
    std::vector<float> want(size_t(shape.n_head) * format.v.dim), got(want.size());
    const float* const own_q = q.data() + row.token * data.q_token_stride;
    const AttentionIo io = {own_q, data.q_token_stride, size_t(format.k.dim), want.data(), want.size()};
    QueryRow alone = row;
    alone.sequence = alone.token = 0;
    const AttentionPlan plan({alone}, kSink);
    if (row.end <= 8192) {
        attend_reference(layer, plan, {&view, 1}, io);
    } else {
        const int threads = int(std::max(1u, std::thread::hardware_concurrency()));
        AttentionWork work;
        work.prepare(plan, shape.n_head, shape.n_head_kv, format, threads);
        std::vector<std::thread> team;
        for (int t = 0; t < threads; t++) {
            team.emplace_back([&, t] { crumb::attend(best_isa(), layer, plan, {&view, 1}, io, work, t, threads); });
        }
        for (std::thread& t : team) t.join();
    }
    machine.download(got.data(), data.out + row.token * data.out_stride, got.size() * sizeof(float));
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        error += std::pow(double(got[i]) - want[i], 2);
        norm += std::pow(double(want[i]), 2);
    }
    return std::sqrt(error / norm);
}

void decode_row(const std::vector<Kernels>& kernels, const Shape& shape, double roof) {
    const PageFormat& format = kernels[0].format;
    const PageFormat exact_format = bf16_format(format.k.dim, format.v.dim);
    const size_t coded_stride = format.bytes() * shape.n_head_kv, exact_stride = exact_format.bytes() * shape.n_head_kv;

    // Tables of the step. Blocks lie in any order in their pools; between sinks and window there are no exact ones.
    const auto blocks = [](int tokens) { return size_t((tokens + 63) / 64); };
    const auto pages_of = [&](int tokens) { return size_t((tokens + format.tokens - 1) / format.tokens); };
    const auto edge_of = [](int tokens) { return std::max(0, tokens - kRecent) / 64 * 64; };
    size_t n_blocks = 0, pages = 0, windows = 0;
    for (int n : shape.contexts) n_blocks = std::max(n_blocks, blocks(n)), pages += pages_of(n);
    std::vector<u32> coded_ids(n_blocks * shape.contexts.size()), exact_ids(coded_ids.size(), kNoBlock), order(pages);
    std::vector<QueryRow> rows;
    double bytes = 0;
    std::mt19937 random(1);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (size_t b = 0, next = 0; b < shape.contexts.size(); b++) {
        const int tokens = shape.contexts[b], edge = edge_of(tokens);
        rows.push_back({u32(b), u32(b), tokens - 1, 0, edge, tokens});
        for (size_t i = 0; i < pages_of(tokens); i++) coded_ids[b * n_blocks + i] = order[next++];
        for (size_t i = 0; i < blocks(tokens); i++) {
            const bool exact = i == 0 || int(i) >= edge / 64;
            if (exact) exact_ids[b * n_blocks + i] = u32(windows++);
            bytes += exact ? double(exact_stride) : double(coded_stride) * kPageTokens / format.tokens;
        }
    }
    const int layers = std::max(2, std::min(64, int(3e8 / bytes) + 1));

    GpuMachine machine;
    const auto raw = [&](size_t n) { return static_cast<std::byte*>(machine.allocate(n)); };
    std::byte* const coded = raw(pages * coded_stride * layers);
    std::byte* const exact = raw(windows * exact_stride * layers);
    fill_pages(coded, pages * layers * shape.n_head_kv, format);
    fill_exact(exact, windows * exact_stride * layers);
    const StepShape step = {shape.batch(), 1, shape.n_head, shape.n_head_kv, multiprocessors()};
    const Kernels& chosen = *choose(kernels, step);
    const StepTables tables = {machine.put(rows), machine.put(coded_ids), machine.put(exact_ids), n_blocks, kSink};
    const std::vector<HeadTables> head_tables = random_tables(format, shape.n_head_kv);
    std::vector<DeviceLayer> heads;
    for (int i = 0; i < layers; i++) heads.push_back(put_tables(machine, kernels[0], head_tables));
    std::normal_distribution<float> normal;
    std::vector<float> q(size_t(shape.batch()) * shape.n_head * format.k.dim);
    for (float& x : q) x = normal(random);
    LayerData data = {.coded = coded, .coded_stride = coded_stride, .exact = exact, .exact_stride = exact_stride,
                      .heads = heads[0].heads, .constants = heads[0].constants};
    data.scale = 1 / std::sqrt(float(format.k.dim));
    data.q = machine.put(q), data.q_token_stride = size_t(shape.n_head) * format.k.dim, data.q_head_stride = format.k.dim;
    data.out = reinterpret_cast<float*>(raw(size_t(shape.batch()) * shape.n_head * format.v.dim * sizeof(float)));
    data.out_stride = size_t(shape.n_head) * format.v.dim;
    std::byte* const memory = raw(workspace(chosen, step).bytes);
    const auto layer = [&](int i) {
        LayerData l = data;
        l.coded += size_t(i % layers) * pages * coded_stride;
        l.exact += size_t(i % layers) * windows * exact_stride;
        l.heads = heads[size_t(i % layers)].heads, l.constants = heads[size_t(i % layers)].constants;
        return l;
    };
    plan(chosen, launch_plan, step, tables, memory, nullptr);
    attend(chosen, step, tables, data, memory, nullptr);
    const size_t own = blocks(shape.contexts[0]);
    const double error = check(format, shape, head_tables, data, {coded_ids.begin(), coded_ids.begin() + long(pages_of(shape.contexts[0]))},
                               {exact_ids.begin(), exact_ids.begin() + own}, rows[0], q, machine);
    const int launches = std::max(layers, 8);
    const double us = median_us(launches, [&](cudaStream_t s, int i) { attend(chosen, step, tables, layer(i), memory, s); });
    const double pages_us = median_us(launches, [&](cudaStream_t s, int i) { read_pages(chosen, step, tables, layer(i), memory, s); });
    const double query_us = median_us(launches, [&](cudaStream_t s, int i) { map_queries(chosen, step, tables, layer(i), memory, s); });
    const double output_us = median_us(launches, [&](cudaStream_t s, int i) { map_outputs(chosen, step, tables, layer(i), memory, s); });
    const double plan_us = median_us(8, [&](cudaStream_t s, int) { plan(chosen, launch_plan, step, tables, memory, s); });
    const double share = bytes / pages_us / 1e6 / roof;
    std::printf("{\"bench\":\"decode\",\"dim\":%d,\"planes_k\":%d,\"planes_v\":%d,\"info\":%d,\"mean\":%s,\"group\":%d,\"gain\":%s,\"heads\":\"%d/%d\",\"batch\":%d,"
                "\"context\":%d,\"name\":\"%s\",\"us\":%.2f,\"pages_us\":%.2f,\"query_us\":%.2f,\"output_us\":%.2f,\"plan_us\":%.2f,"
                "\"bytes\":%.0f,\"tbs\":%.3f,\"roof\":%.3f,\"error\":%.2e}\n",
                format.k.dim, format.k.planes, format.v.planes, int(format.k.info), format.k.mean ? "true" : "false", format.k.group,
                format.k.token_gain ? "true" : "false", shape.n_head, shape.n_head_kv, shape.batch(), shape.contexts[0], shape.name, us, pages_us, query_us, output_us, plan_us, bytes,
                bytes / pages_us / 1e6, share, error);
    std::fprintf(stderr, "d%d k%d v%d info%d%s g%d %3d/%d B=%-3d %7d%s %9.2f us  pages %9.2f us (%3.0f %%)  maps %5.2f + %5.2f  plan %5.2f  error %.1e\n",
                 format.k.dim, format.k.planes, format.v.planes, int(format.k.info), format.k.mean ? " mean" : format.k.token_gain ? " gain" : "", format.k.group, shape.n_head,
                 shape.n_head_kv, shape.batch(), shape.contexts[0], shape.name, us, pages_us, 100 * share, query_us, output_us,
                 plan_us, error);
    std::fflush(stdout);
}

// A chunk of n rows behind `depth` tokens of one sequence, by the position rule: all rows exact in the ring, all before coded.
void prefill_row(const std::vector<Kernels>& kernels, int n_head, int n_head_kv, int n, int depth) {
    const PageFormat& format = kernels[0].format;
    if (!takes_chunks(format.k.dim)) return;
    const PageFormat exact_format = bf16_format(format.k.dim, format.v.dim);
    const size_t coded_stride = format.bytes() * n_head_kv, exact_stride = exact_format.bytes() * n_head_kv;
    const int tokens = depth + n, n_blocks = (tokens + 63) / 64;
    std::vector<QueryRow> rows;
    for (int t = depth; t < tokens; t++) rows.push_back({0, u32(t - depth), t, 0, std::max(0, t + 1 - kRecent) / 64 * 64, t + 1});
    std::vector<u32> coded_ids(static_cast<size_t>(n_blocks)), exact_ids(coded_ids.size(), kNoBlock);
    std::mt19937 random(1);
    std::iota(coded_ids.begin(), coded_ids.end(), 0);
    std::shuffle(coded_ids.begin(), coded_ids.end(), random);
    u32 windows = 0;
    for (int b = 0; b < n_blocks; b++) {
        if (b == 0 || b >= rows[0].coded_end / 64) exact_ids[size_t(b)] = windows++;
    }
    const int layers = 2;
    GpuMachine machine;
    const auto raw = [&](size_t bytes) { return static_cast<std::byte*>(machine.allocate(bytes)); };
    std::byte* const coded = raw(size_t(n_blocks) * coded_stride * layers);
    std::byte* const exact = raw(windows * exact_stride * layers);
    fill_pages(coded, size_t(n_blocks) * layers * n_head_kv, format);
    fill_exact(exact, windows * exact_stride * layers);
    const std::vector<HeadTables> head_tables = random_tables(format, n_head_kv);
    const DeviceLayer heads = put_tables(machine, kernels[0], head_tables);
    std::normal_distribution<float> normal;
    std::vector<float> q(size_t(n) * n_head * format.k.dim);
    for (float& x : q) x = normal(random);
    LayerData data = {.coded = coded, .coded_stride = coded_stride, .exact = exact, .exact_stride = exact_stride,
                      .heads = heads.heads, .constants = heads.constants};
    data.scale = 1 / std::sqrt(float(format.k.dim));
    data.q = machine.put(q), data.q_token_stride = size_t(n_head) * format.k.dim, data.q_head_stride = format.k.dim;
    data.out_stride = size_t(n_head) * format.v.dim;
    data.out = reinterpret_cast<float*>(raw(size_t(n) * data.out_stride * sizeof(float)));
    const PrefillShape shape = {1, n, n_head, n_head_kv, multiprocessors(), size_t(n_blocks) + size_t(n / 64) + 4, format.k.dim};
    const StepTables tables = {machine.put(rows), machine.put(coded_ids), machine.put(exact_ids), size_t(n_blocks), kSink};
    std::byte* const memory = raw(prefill_workspace(shape).bytes);
    const PrefillLaunches& launches = prefill_launches();
    plan_prefill(launches, shape, tables, memory, nullptr);
    attend_prefill(kernels[0], launches, shape, tables, data, memory, nullptr);
    double error = 0;
    for (const int row : {0, n / 3, n - 1}) {
        error = std::max(error, check(format, Shape(n_head, n_head_kv, 1, tokens), head_tables, data, coded_ids, exact_ids, rows[size_t(row)], q, machine));
    }
    const auto layer = [&](int i) {
        LayerData l = data;
        l.coded += size_t(i % layers) * size_t(n_blocks) * coded_stride;
        l.exact += size_t(i % layers) * windows * exact_stride;
        return l;
    };
    const double us = median_us(4, [&](cudaStream_t s, int i) { attend_prefill(kernels[0], launches, shape, tables, layer(i), memory, s); });
    const double unpack_us = median_us(4, [&](cudaStream_t s, int i) {
        for (int k = 0; k < shape.slices(); k++) unpack_slice(kernels[0], k, shape, tables, layer(i), memory, s);
    });
    const double plan_us = median_us(8, [&](cudaStream_t s, int) { plan_prefill(launches, shape, tables, memory, s); });
    double pairs = 0;
    for (const QueryRow& row : rows) pairs += row.end;
    const double tflops = 4.0 * pairs * n_head * format.k.dim / us / 1e6;
    std::printf("{\"bench\":\"prefill\",\"dim\":%d,\"planes_k\":%d,\"planes_v\":%d,\"info\":%d,\"mean\":%s,\"group\":%d,\"gain\":%s,\"heads\":\"%d/%d\",\"rows\":%d,"
                "\"depth\":%d,\"us\":%.2f,\"unpack_us\":%.2f,\"plan_us\":%.2f,\"tflops\":%.1f,\"workspace\":%zu,\"error\":%.2e}\n",
                format.k.dim, format.k.planes, format.v.planes, int(format.k.info), format.k.mean ? "true" : "false", format.k.group,
                format.k.token_gain ? "true" : "false", n_head, n_head_kv, n, depth, us, unpack_us, plan_us, tflops,
                prefill_workspace(shape).bytes, error);
    std::fprintf(stderr, "prefill d%d k%d v%d info%d %3d/%d %5d rows at %6d %9.2f us, %.0f Tflop/s, unpacking %.2f in %d slices, plan %.2f  error %.1e\n",
                 format.k.dim, format.k.planes, format.v.planes, int(format.k.info), n_head, n_head_kv, n, depth, us, tflops, unpack_us,
                 shape.slices(), plan_us, error);
    std::fflush(stdout);
}

// Rows and depths of chunks.
void prefill_rows(const std::vector<Kernels>& kernels) {
    for (const auto& [n, depth] : {std::pair(8192, 0), {2048, 32768}, {512, 32768}, {64, 32768}, {512, 0}}) prefill_row(kernels, 32, 8, n, depth);
}

// Encoding blocks of 64 tokens, 8 heads.
void encode_row(const Recipe& recipe, const char* name, int dim, int n_blocks) {
    const int heads = 8;
    const PageFormat format = page_format(recipe, dim, dim), exact = bf16_format(dim, dim);
    const std::vector<HeadTables> tables = layer_tables(recipe, 0, heads, format, nullptr);
    GpuMachine machine;
    const auto put_side = [&](bool key) {
        std::vector<EncodeTables> all;
        for (const HeadTables& head : tables) {
            const SideTables& t = key ? head.k : head.v;
            const auto put = [&](const auto& x) { return x.empty() ? nullptr : machine.put(x); };
            all.push_back({put(t.mean), put(t.encode), put(t.sigma), put(t.step), put(t.mean_step), put(t.digits), put(t.direction),
                           put(t.digit), t.gain_reference});
        }
        return machine.put(all);
    };
    EncodeArgs args = {};
    args.k = encode_side(recipe.k, format, true, put_side(true)), args.v = encode_side(recipe.v, format, false, put_side(false));
    args.n_head_kv = heads;
    args.exact_bytes = exact.bytes(), args.exact_stride = heads * exact.bytes();
    args.coded_bytes = format.bytes(), args.coded_stride = heads * format.bytes();
    std::byte* const rows = static_cast<std::byte*>(machine.allocate(n_blocks * args.exact_stride));
    fill_exact(rows, n_blocks * args.exact_stride);
    args.exact = reinterpret_cast<const u8*>(rows);
    args.coded = static_cast<u8*>(machine.allocate(n_blocks * args.coded_stride));
    std::vector<EncodeJob> jobs;
    for (int b = 0; b < n_blocks; b++) jobs.push_back({u32(b), u32(n_blocks - 1 - b), 0, 0});
    const EncodeJob* const device_jobs = machine.put(jobs);
    args.counts = machine.put(std::vector<EncodeCountsDevice>{{0, 0}});
    const double us = median_us(8, [&](cudaStream_t s, int) { launch_encode(args, device_jobs, n_blocks, s); });
    const double bytes = double(n_blocks) * double(args.exact_stride + args.coded_stride);
    std::printf("{\"bench\":\"encode\",\"recipe\":\"%s\",\"dim\":%d,\"tokens\":%d,\"us\":%.2f,\"tbs\":%.3f}\n", name, dim, 64 * n_blocks, us, bytes / us / 1e6);
    std::fprintf(stderr, "encode %s %6d tokens, 8 heads of %d: %9.2f us, %.2f TB/s read and written\n", name, 64 * n_blocks, dim, us, bytes / us / 1e6);
}

void encode_rows() {
    Recipe clipped = find_recipe("quarot:paper");  // oscar's stages, without its artefact
    clipped.k.clip = 0.96f, clipped.v.clip = 0.92f;
    for (const int dim : {64, 128, 256}) {
        for (const int blocks : {1, 8, 64, 512}) {
            encode_row(find_recipe("had2"), "had2", dim, blocks);
            encode_row(clipped, "range with clip", dim, blocks);
            for (const char* name : {"omni:paper", "kivi32"}) encode_row(find_recipe(name), name, dim, blocks);
        }
    }
}

// New rows of n tokens, 8 heads of 128, into exact records: one a sequence, or a chunk of a prompt.
void store_row(int n_tokens, bool chunk) {
    const int heads = 8, dim = 128, blocks = chunk ? (n_tokens + 63) / 64 : n_tokens;
    const PageFormat exact = bf16_format(dim, dim);
    GpuMachine machine;
    std::vector<u32> block(static_cast<size_t>(n_tokens)), slot(block.size());
    for (u32 i = 0; i < u32(n_tokens); i++) block[i] = chunk ? i / 64 : i, slot[i] = chunk ? i : 7 * i;
    const size_t row_bytes = size_t(n_tokens) * heads * dim * 2;
    const auto rows = [&] {
        std::byte* p = static_cast<std::byte*>(machine.allocate(row_bytes));
        fill_exact(p, row_bytes);
        return reinterpret_cast<const uint16_t*>(p);
    };
    const size_t stride = heads * exact.bytes();
    const StoreArgs args = {rows(), rows(), machine.put(block), machine.put(slot),
                            static_cast<u8*>(machine.allocate(size_t(blocks) * stride)), stride, dim, dim, heads};
    const double us = median_us(8, [&](cudaStream_t s, int) { launch_store(args, n_tokens, s); });
    std::printf("{\"bench\":\"store\",\"tokens\":%d,\"chunk\":%s,\"us\":%.2f,\"tbs\":%.3f}\n", n_tokens, chunk ? "true" : "false", us, 4.0 * row_bytes / us / 1e6);
    std::fprintf(stderr, "store %6d tokens%s, 8 heads of 128: %9.2f us, %.2f TB/s read and written\n", n_tokens, chunk ? " of a prompt" : ", one a sequence", us, 4.0 * row_bytes / us / 1e6);
}

// The shapes to show for a format.
std::vector<Shape> shapes_of(const PageFormat& f, bool quick) {
    constexpr int k8 = 8192, k32 = 32768, k128 = 131072;
    const bool main_format = f.k.dim == 128 && f.k.info == SideInfo::scale_zero && f.k.planes == 128;
    if (quick) return {{32, 8, 1, k32}, {32, 8, 32, k32}};
    if (f.k.info == SideInfo::channels) return {{32, 8, 1, k8}, {32, 8, 1, k32}, {32, 8, 1, k128}, {32, 8, 16, k32}, {32, 8, 32, k128}};
    if (!main_format) return {{32, 8, 1, k32}, {32, 8, 1, k128}, {32, 8, 32, k128}};
    std::vector<Shape> shapes = {ragged()};
    for (const auto& [batch, context] : {std::pair(1, k8), {1, k32}, {1, k128}, {1, 8 * k128}, {16, k32}, {32, k32}, {32, k128}, {64, k8}}) {
        shapes.push_back({32, 8, batch, context});
    }
    for (const auto& [heads, kv] : {std::pair(64, 8), {96, 8}, {8, 8}, {4, 1}, {12, 1}}) {
        for (const auto& [batch, context] : {std::pair(1, k32), {1, k128}, {32, k32}}) shapes.push_back({heads, kv, batch, context});
    }
    return shapes;
}

int run(bool quick, const Shape* only) {
    const double roof = read_roof();
    cudaDeviceProp device;
    require(cudaGetDeviceProperties(&device, 0), "device");
    std::printf("{\"bench\":\"roof\",\"device\":\"%s\",\"tbs\":%.3f}\n", device.name, roof);
    std::fprintf(stderr, "%s, read roof %.2f TB/s\n", device.name, roof);
    for (const std::vector<Kernels>& kernels : kernels_by_format()) {
        for (const Shape& shape : only ? std::vector{*only} : shapes_of(kernels[0].format, quick)) decode_row(kernels, shape, roof);
    }
    if (only) return 0;
    prefill_rows(all_kernels()[0]);
    for (const int tokens : {1, 8, 64}) store_row(tokens, false);
    store_row(32768, true);
    encode_rows();
    return 0;
}

}  // namespace

}  // namespace crumb::cuda

// cuda_bench [--quick | --prefill | --encode | --ragged | --shape HEADS/KV_HEADS,REQUESTS,TOKENS | --chunk HEADS/KV_HEADS,ROWS,TOKENS_BEFORE]
int main(int argc, char** argv) {
    using namespace crumb::cuda;
    if (argc == 3 && std::strcmp(argv[1], "--shape") == 0) {
        Shape shape(0, 0, 0, 0);
        int batch = 0, context = 0;
        if (std::sscanf(argv[2], "%d/%d,%d,%d", &shape.n_head, &shape.n_head_kv, &batch, &context) != 4) return 2;
        shape.contexts.assign(size_t(batch), context);
        return run(false, &shape);
    }
    if (argc == 2 && std::strcmp(argv[1], "--ragged") == 0) {
        const Shape shape = ragged();
        return run(false, &shape);
    }
    if (argc == 3 && std::strcmp(argv[1], "--chunk") == 0) {
        int heads = 0, kv = 0, rows = 0, depth = 0;
        if (std::sscanf(argv[2], "%d/%d,%d,%d", &heads, &kv, &rows, &depth) != 4) return 2;
        for (const std::vector<Kernels>& kernels : kernels_by_format()) prefill_row(kernels, heads, kv, rows, depth);
        return 0;
    }
    if (argc > 1 && std::strcmp(argv[1], "--prefill") == 0) {
        for (const std::vector<Kernels>& kernels : kernels_by_format()) prefill_rows(kernels);
        return 0;
    }
    if (argc > 1 && std::strcmp(argv[1], "--encode") == 0) {
        encode_rows();
        return 0;
    }
    return run(argc > 1 && std::strcmp(argv[1], "--quick") == 0, nullptr);
}
