#include "cuda_device.h"

#include <crumb/error.h>

#include <cuda.h>

#include <algorithm>

namespace crumb::llama {

namespace {

double mib(size_t bytes) { return double(bytes) / 1048576.0; }

void require(CUresult status, const char* what) {
    const char* why = nullptr;
    if (status != CUDA_SUCCESS) { fail("CUDA: {}: {}", what, cuGetErrorString(status, &why) == CUDA_SUCCESS ? why : "unknown error"); }
}

// Main memory as the driver can map it beside the device's.
CUmemLocation host_location(int ordinal) {
    const auto has = [&](CUdevice_attribute what) {
        int value = 0;
        return cuDeviceGetAttribute(&value, what, ordinal) == CUDA_SUCCESS && value != 0;
    };
    CUmemLocation location = {};
    if (has(CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
        location.type = CU_MEM_LOCATION_TYPE_HOST;
    } else if (has(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
        location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
        require(cuDeviceGetAttribute(&location.id, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, ordinal), "NUMA node");
        location.id = std::max(0, location.id);
    } else {
        fail("--kv-host-memory: the driver of CUDA{} cannot map main memory beside the device's: leave it out, or {}", ordinal, kRemedy);
    }
    return location;
}

CUmemAllocationProp memory_at(CUmemLocation location) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location;
    return properties;
}

size_t granularity(const CUmemAllocationProp& memory) {
    size_t bytes = 0;
    require(cuMemGetAllocationGranularity(&bytes, &memory, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "granularity");
    return bytes;
}

[[noreturn]] void no_memory(int ordinal, size_t bytes) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    fail("no memory for the KV cache on CUDA{}: {:.1f} MiB more are needed and {:.1f} of {:.1f} MiB are free; use a smaller "
         "context (-c) or fewer sequences (-np), or {}",
         ordinal, mib(bytes), mib(free), mib(total), kRemedy);
}

}  // namespace

void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess) { fail("CUDA: {}: {}", what, cudaGetErrorString(status)); }
}

OnDevice::OnDevice(int ordinal) {
    require(cudaGetDevice(&before_), "device");
    require(cudaSetDevice(ordinal), "device");
}

std::byte* CudaMemory::allocate(size_t bytes, size_t on_host) {
    const OnDevice on(ordinal_);
    if (on_host > 0) { return allocate_both(bytes, on_host); }
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        cudaGetLastError();
        no_memory(ordinal_, bytes);
    }
    require(cudaMemset(memory, 0, bytes), "memory");
    require(cudaDeviceSynchronize(), "memory");
    return static_cast<std::byte*>(memory);
}

std::byte* CudaMemory::allocate_both(size_t bytes, size_t on_host) {
    CUmemLocation here = {};
    here.type = CU_MEM_LOCATION_TYPE_DEVICE, here.id = ordinal_;
    const CUmemLocation there = host_location(ordinal_);
    const CUmemAllocationProp parts[2] = {memory_at(here), memory_at(there)};
    const size_t unit = std::max(granularity(parts[0]), granularity(parts[1]));
    const auto whole = [&](size_t n) { return (n + unit - 1) / unit * unit; };
    CUdeviceptr base = 0;
    require(cuMemAddressReserve(&base, whole(bytes), unit, 0, 0), "addresses");
    std::byte* const memory = reinterpret_cast<std::byte*>(base);
    Split& split = splits_[memory] = {whole(bytes), whole(bytes - on_host), {}};
    try {
        const size_t sizes[2] = {split.on_device, split.bytes - split.on_device};
        for (int part = 0; part < 2; ++part) {
            if (sizes[part] == 0) { continue; }
            const CUdeviceptr at = base + (part == 0 ? 0 : split.on_device);
            CUmemGenericAllocationHandle handle = 0;
            if (cuMemCreate(&handle, sizes[part], &parts[part], 0) != CUDA_SUCCESS) {
                if (part == 0) { no_memory(ordinal_, sizes[0]); }
                fail("no main memory for what --kv-host-memory puts there: {:.1f} MiB more are needed, and they must stay in place; lower it", mib(sizes[1]));
            }
            const CUresult mapped = cuMemMap(at, sizes[part], 0, handle, 0);
            cuMemRelease(handle);  // the mapping holds it
            require(mapped, "map");
            split.mapped[part] = sizes[part];
            CUmemAccessDesc access[2] = {{here, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {there, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
            require(cuMemSetAccess(at, sizes[part], access, size_t(part + 1)), "access");
            require(cudaMemset(reinterpret_cast<void*>(at), 0, sizes[part]), "memory");
        }
        require(cudaDeviceSynchronize(), "memory");
    } catch (...) {
        free(memory);
        throw;
    }
    return memory;
}

void CudaMemory::free(std::byte* memory) {
    const OnDevice on(ordinal_);
    cudaDeviceSynchronize();
    const auto split = splits_.find(memory);
    if (split == splits_.end()) {
        cudaFree(memory);
        return;
    }
    const auto base = reinterpret_cast<CUdeviceptr>(memory);
    const auto& [bytes, on_device, mapped] = split->second;
    if (mapped[0] > 0) { cuMemUnmap(base, mapped[0]); }
    if (mapped[1] > 0) { cuMemUnmap(base + on_device, mapped[1]); }
    cuMemAddressFree(base, bytes);
    splits_.erase(split);
}

// A copy is of one kind of memory: a record may lie on both sides.
size_t CudaMemory::to_border(const void* at, size_t bytes) const {
    auto split = splits_.upper_bound(static_cast<const std::byte*>(at));
    if (split == splits_.begin()) { return bytes; }
    --split;
    const size_t offset = size_t(static_cast<const std::byte*>(at) - split->first);
    return offset < split->second.on_device ? std::min(bytes, split->second.on_device - offset) : bytes;
}

void CudaMemory::clear(std::byte* to, size_t bytes) {
    const OnDevice on(ordinal_);
    require(cudaDeviceSynchronize(), "wait");
    for (size_t n = 0; bytes > 0; to += n, bytes -= n) {
        n = to_border(to, bytes);
        require(cudaMemset(to, 0, n), "clear");
    }
    require(cudaDeviceSynchronize(), "clear");
}

// The backend's streams do not wait for others.
void CudaMemory::move(void* to, const void* from, size_t bytes) {
    const OnDevice on(ordinal_);
    require(cudaDeviceSynchronize(), "wait");
    auto* target = static_cast<std::byte*>(to);
    auto* source = static_cast<const std::byte*>(from);
    for (size_t n = 0; bytes > 0; target += n, source += n, bytes -= n) {
        n = std::min(to_border(target, bytes), to_border(source, bytes));
        require(cudaMemcpy(target, source, n, cudaMemcpyDefault), "copy");
    }
    require(cudaDeviceSynchronize(), "copy");
}

}  // namespace crumb::llama
