// The kernels on a GPU: every format of the build, the same cases as on the emulator and longer ones; the encoder's bytes;
// a step in a CUDA graph. Run by tools/gpu/test.sh, under compute-sanitizer too (--gtest_filter=*Short*).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/decode_cases.h"
#include "cuda/encode_cases.h"
#include "cuda/gpu_machine.h"
#include "recipe/cuda/launch.h"

namespace crumb::cuda {

namespace {

std::string name_of_format(const PageFormat& f) {
    if (f.k.info == SideInfo::channels) return fmt::format("d{}_groups_of_{}{}", f.k.dim, f.k.group, f.k.token_gain ? "_gain" : "");
    const char* info[] = {"none", "scale_zero", "gain16", "gain8"};
    return fmt::format("d{}_k{}_v{}_{}{}", f.k.dim, f.k.planes, f.v.planes, info[int(f.k.info)], f.k.mean && f.v.mean ? "_means" : f.k.mean ? "_mean" : "");
}

class DeviceDecode : public testing::TestWithParam<size_t> {
  protected:
    const std::vector<Kernels>& kernels() const { return kernels_by_format()[GetParam()]; }
    GpuMachine machine;
};

TEST_P(DeviceDecode, ShortSequences) {
    Cases cases(machine, kernels());
    cases.step.blocks = 5;
    cases.ends(4, 2, {410, 65, 1, 190}, 1, 1.0f, true);
    cases.ends(12, 1, {300}, 2, 1.0f, false);
    cases.bounds();
    cases.unseen();
}

TEST_P(DeviceDecode, AllGroupSizesAndRows) {
    Cases cases(machine, kernels());
    cases.step.blocks = multiprocessors();
    for (int group = 1; group <= 16; group++) cases.ends(2 * group, 2, {1410, 65}, 1, 1.0f, true);
    for (int rows = 1; rows <= 8; rows++) cases.ends(8, 2, {700, 260}, rows, 1.0f, false);
}

TEST_P(DeviceDecode, RaggedBatchesTwice) {
    Cases cases(machine, kernels());
    std::vector<int> lengths;
    for (int i = 0; i < 60; i++) lengths.push_back(1 + i * i * 7 % 1900);
    cases.same_bits(lengths, {1, 17, multiprocessors()});
    cases.same_bits({30000, 3}, {multiprocessors()});
}

TEST_P(DeviceDecode, DataThatHurts) {
    Cases cases(machine, kernels());
    cases.step.blocks = multiprocessors();
    for (const float query : {0.0f, 1e-20f, 0.1f, 6.0f, 60.0f, 1000.0f}) cases.ends(4, 2, {3000}, 1, query, false);
    cases.softcap_and_sinks();
    cases.odd_queries();
    cases.odd_pages();
}

// Data of all kinds, by the recipes that have such pages.
TEST_P(DeviceDecode, ShortDataOfRecipes) {
    const PageFormat& f = kernels()[0].format;
    if (f.planar()) GTEST_SKIP();
    Cases cases(machine, kernels());
    cases.step.blocks = 5;
    cases.data(f.k.token_gain ? "omni:paper" : f.k.group == 32 ? "kivi32" : "kivi128");
}

// Chunks, if the format has the kernel.
TEST_P(DeviceDecode, ShortChunks) {
    if (!takes_chunks(kernels()[0].format.k.dim)) GTEST_SKIP();
    Cases cases(machine, kernels());
    cases.step.prefill_bytes = 1 << 30;
    cases.step.blocks = 3;
    cases.chunks(4, 1, {{300, 40}}, 1.0f, true);
    cases.chunks(2, 2, {{130, 130}, {330, 9}}, 3.0f, false);
    cases.bounds();
    cases.unseen();
}

TEST_P(DeviceDecode, ManyChunks) {
    if (!takes_chunks(kernels()[0].format.k.dim)) GTEST_SKIP();
    Cases cases(machine, kernels());
    cases.step.prefill_bytes = 1 << 30;
    cases.step.blocks = multiprocessors();
    for (const int group : {1, 3, 4, 8, 12, 16}) cases.chunks(2 * group, 2, {{900, 300}, {1500, 33}, {64, 64}}, 1.0f, true);
    for (const float query : {0.0f, 0.1f, 6.0f, 60.0f}) cases.chunks(4, 2, {{1200, 130}}, query, false);
    cases.softcap_and_sinks(20);
    cases.odd_queries();
    cases.odd_pages();
}

std::vector<size_t> indices() {
    std::vector<size_t> all(kernels_by_format().size());
    for (size_t i = 0; i < all.size(); i++) all[i] = i;
    return all;
}

INSTANTIATE_TEST_SUITE_P(Formats, DeviceDecode, testing::ValuesIn(indices()),
                         [](const auto& index) {
                             const Kernels& kernels = kernels_by_format()[index.param][0];
                             const KernelFormat& f = kernels.compiled;
                             return name_of_format(kernels.format) + (f.any_planes ? fmt::format("_of_{}", f.k.planes) : "");
                         });

TEST(DeviceEncode, ShortBytesAreThoseOfTheCpu) {
    GpuMachine machine;
    for (const Recipe& recipe : encoder_recipes()) {
        for (const int dim : {64, 128, 256}) expect_same_pages(machine, launch_encode, recipe, dim, dim, kAllRows);
        expect_same_pages(machine, launch_encode, recipe, 128, 80, kAllRows);
    }
    for (const char* name : kGroupedRecipes) {
        for (const int dim : {64, 128, 256}) expect_same_pages(machine, launch_encode, find_recipe(name), dim, dim, kAllRows);
    }
}

// A step is captured once and replayed; the output is that of the launches themselves.
TEST(DeviceGraph, ShortReplaysGiveTheSame) {
    GpuMachine machine;
    const std::vector<Kernels>& kernels = all_kernels()[0];
    const PageFormat& f = kernels[0].format;
    test::World world({8, 2, f.k.dim, f.v.dim}, f);
    world.add_sequence(1000);
    world.make_queries(1);
    const auto rows = Cases::rows_at_end({1000}, 1, 100);
    const auto plain = world.run_by(
        [&](const AttentionLayer& layer, const std::vector<QueryRow>& r, int sink, std::span<const SequenceView> views,
            const AttentionIo& io) { attend_on(machine, kernels, {.blocks = 9}, layer, r, sink, views, io, 1); },
        rows, 64);
    const auto replayed = world.run_by(
        [&](const AttentionLayer& layer, const std::vector<QueryRow>& r, int sink, std::span<const SequenceView> views,
            const AttentionIo& io) {
            const StepShape shape = {1, 1, layer.n_head, layer.n_head_kv, 9};
            const Kernels& chosen = *choose(kernels, shape);
            const DevicePool coded = put_blocks(machine, views, true), exact = put_blocks(machine, views, false);
            const StepTables tables = {machine.put(r), machine.put(coded.ids[0]), machine.put(exact.ids[0]), coded.ids[0].size(), sink};
            const DeviceLayer heads = put_tables(machine, kernels[0], layer.tables);
            LayerData data = {.coded = coded.base, .coded_stride = coded.stride, .exact = exact.base, .exact_stride = exact.stride};
            data.heads = heads.heads, data.constants = heads.constants, data.scale = layer.scale;
            data.q = machine.put(world.q), data.q_token_stride = io.token_stride, data.q_head_stride = io.head_stride;
            data.out = machine.put(std::vector<float>(io.out_stride)), data.out_stride = io.out_stride;
            const Workspace w = workspace(chosen, shape);
            std::byte* memory = static_cast<std::byte*>(machine.allocate(w.bytes));
            cudaStream_t stream;
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            require(cudaStreamCreate(&stream), "stream");
            require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
            plan(chosen, launch_plan, shape, tables, memory, stream);
            attend(chosen, shape, tables, data, memory, stream);
            require(cudaStreamEndCapture(stream, &graph), "end of capture");
            require(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
            for (int i = 0; i < 3; i++) require(cudaGraphLaunch(exec, stream), "replay");
            require(cudaStreamSynchronize(stream), "replays");
            machine.download(io.out, data.out, io.out_stride * sizeof(float));
            cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
        },
        rows, 64);
    EXPECT_EQ(plain.out, replayed.out);
}

// Layers with different counts of planes share a kernel and take different amounts of shared memory; a graph is instantiated when the
// last of them has been recorded.
TEST(DeviceGraph, ShortLayersOfDifferentSizes) {
    for (const std::vector<Kernels>& kernels : all_kernels()) {
        const KernelFormat& f = kernels[0].compiled;
        if (!f.any_planes || !kernels[0].unpack) continue;
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        require(cudaStreamCreate(&stream), "stream");
        require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        const PrefillShape shape = {.n_chunks = 1, .rows_per_chunk = 128, .n_head = 1, .n_head_kv = 1, .blocks = 1, .most_entries = 2, .dim = f.k.dim};
        for (const int planes : {f.k.planes, 32}) {
            PageFormat format = {.k = f.k, .v = f.v};
            format.k.planes = format.v.planes = planes;
            unpack_slice(fitted(kernels[0], format), 0, shape, {}, {}, nullptr, stream);
        }
        require(cudaStreamEndCapture(stream, &graph), "end of capture");
        EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess) << "heads of " << f.k.dim << ", up to " << f.k.planes << " planes";
        cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
    }
}

}  // namespace

}  // namespace crumb::cuda

int main(int argc, char** argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::puts("no CUDA device: nothing was tested");
        return 77;
    }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
