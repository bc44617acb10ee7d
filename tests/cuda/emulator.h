// Runs kernels written in the words of base/cuda/simt.h on the CPU: every thread is a fiber, warp operations are what the
// PTX manual says, blocks run one after the other in a shuffled order, warps of a block in turns of a shuffled order.
// It finds wrong results, operations that not all lanes of a warp reach, waits that would never end, copies that are read
// too early (a copy happens at once or only when it is waited for, by lot) and results that depend on the order of blocks.
// It does not find races inside a warp, and says nothing about speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace crumb::simt {

struct Grid {
    int blocks = 1;
    int threads = 32;
    size_t shared_bytes = 0;
    uint32_t seed = 1;  // of the order of blocks and warps and of the time of copies
};

// Calls kernel(shared) in every thread. Shared memory is 128-byte aligned and starts as 0xff. Aborts with a message where
// a GPU would hang.
void emulate(const Grid& grid, const std::function<void(std::byte* shared)>& kernel);

}  // namespace crumb::simt
