// A device that is this machine's memory and the emulator.
#pragma once

#include <cstring>
#include <memory>

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

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::vector<std::unique_ptr<void, Free>> memory_;
};

template <PageFormat F, int NT>
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
    return k;
}

}  // namespace crumb::cuda
