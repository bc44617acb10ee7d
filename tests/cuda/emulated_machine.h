// A device that is this machine's memory and the emulator.
#pragma once

#include <cstring>
#include <memory>

#include "attention/cuda/prefill.h"
#include "cuda/device_attend.h"
#include "cuda/emulator.h"

namespace crumb::cuda {

inline uint32_t emulated_seed = 1;

class EmulatedMachine : public Machine {
  public:
    void* allocate(size_t bytes) override {
        memory_.emplace_back(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
        std::memset(memory_.back().get(), 0xff, bytes);
        return memory_.back().get();
    }
    void upload(void* device, const void* host, size_t bytes) override { std::memcpy(device, host, bytes); }
    void download(void* host, const void* device, size_t bytes) override { std::memcpy(host, device, bytes); }
    void zero(void* device, size_t bytes) override { std::memset(device, 0, bytes); }
    PlanLaunch plan_launch() const override {
        return [](const PlanArgs& args, Stream) {
            const simt::Grid grid = {2, 64, plan_shared_bytes(args.n_tiles, 64, args.grid), emulated_seed++};
            simt::emulate(grid, [&](std::byte* shared) { make_plan(args, shared); });
        };
    }
    PrefillLaunches prefill_launches() const override {
        return {.plan = [](const PrefillPlanArgs& args, Stream) {
                    simt::emulate({args.n_chunks, 64, 0, emulated_seed++}, [&](std::byte*) { make_prefill_plan(args); });
                },
                .attend = [](const PrefillArgs& args, int dim, int blocks, Stream) {
                    const auto run = [&]<int kDim, bool kSoftcap>() {
                        using P = Prefill<kDim, kSoftcap>;
                        simt::emulate({blocks, 32 * kPrefillWarps, P::kShared, emulated_seed++}, [&](std::byte* shared) { P::run(args, shared); });
                    };
                    if (args.softcap > 0) {
                        dim == 64 ? run.template operator()<64, true>() : run.template operator()<128, true>();
                    } else {
                        dim == 64 ? run.template operator()<64, false>() : run.template operator()<128, false>();
                    }
                }};
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::vector<std::unique_ptr<void, Free>> memory_;
};

template <KernelFormat F, int NT>
Kernels emulated_kernels() {
    Kernels k = kernels_of<F, NT>();
    k.map_query = [](const MapArgs& args, int blocks, bool few, Stream) {
        const auto run = [&]<bool kFew>() {
            simt::emulate({blocks, 64, Maps<F, NT>::template kQueryShared<kFew>, emulated_seed++},
                          [&](std::byte* shared) { Maps<F, NT>::template query<kFew>(args, shared); });
        };
        if (few) { run.template operator()<true>(); } else { run.template operator()<false>(); }
    };
    k.decode = [](const DecodeArgs& args, int blocks, Stream) {
        using D = DecodeFormat<F, NT>;
        simt::emulate({blocks, 32 * D::kWarps, D::kSharedSize, emulated_seed++},
                      [&](std::byte* shared) { Decode<F, NT>::run(args, shared); });
    };
    k.map_output = [](const MapArgs& args, int blocks, bool few, Stream) {
        const auto run = [&]<bool kFew>() {
            simt::emulate({blocks, 64, Maps<F, NT>::template kOutputShared<kFew>, emulated_seed++},
                          [&](std::byte* shared) { Maps<F, NT>::template output<kFew>(args, shared); });
        };
        if (few) { run.template operator()<true>(); } else { run.template operator()<false>(); }
    };
    if constexpr (F.k.dim <= 128) {
        k.unpack = [](const UnpackArgs& args, int blocks, Stream) {
            simt::emulate({blocks, kUnpackThreads, Unpack<F>::shared_bytes(args.planes), emulated_seed++}, [&](std::byte* shared) { Unpack<F>::run(args, shared); });
        };
    }
    return k;
}

}  // namespace crumb::cuda
