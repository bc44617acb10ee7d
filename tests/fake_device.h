// A device whose memory is main memory: what the cache asks of one, without a GPU.
#pragma once

#include <crumb/cache.h>

#include <cstring>
#include <map>
#include <vector>

namespace crumb::test {

class FakeDevice : public DeviceMemory {
  public:
    std::byte* allocate(size_t bytes, size_t on_host = 0) override {
        std::vector<std::byte> memory(bytes);
        std::byte* at = memory.data();
        pieces[at] = std::move(memory);
        host_bytes += on_host;
        return at;
    }
    void free(std::byte* memory) override { pieces.erase(memory); }
    void copy(std::byte* to, const std::byte* from, size_t bytes) override { std::memcpy(to, from, bytes); }
    void clear(std::byte* to, size_t bytes) override { std::memset(to, 0, bytes); }
    void read(void* to, const std::byte* from, size_t bytes) override { std::memcpy(to, from, bytes), reads++; }
    void write(std::byte* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

    std::map<std::byte*, std::vector<std::byte>> pieces;
    size_t host_bytes = 0;
    int reads = 0;
};

}  // namespace crumb::test
