// Blocks of one kind: a slab of memory a layer, a free list and reference counts. Block i is record i of every slab, so
// a block id is good for all layers. Memory is reserved at once and becomes physical when it is written.
//
// A block may have a name that says what it holds. It is found by it, and stays when its last reference goes: such kept
// blocks are as available as free ones, and are evicted when no other is free, the one that was released first before
// the others. A block in use is never evicted.
#pragma once

#include <crumb/cache.h>
#include <crumb/page.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace crumb {

// The records of one layer. n_head_kv = 0: the layer has none in this pool.
struct SlabShape {
    PageFormat format;
    int n_head_kv = 0;
    size_t stride() const { return n_head_kv == 0 ? 0 : size_t(n_head_kv) * format.bytes(); }
};

struct PoolShape {
    std::string_view name;  // for people
    int64_t n_blocks = 0;
    std::vector<SlabShape> slabs;  // by model layer
    size_t block_bytes() const;    // of a block in all layers
    size_t bytes() const { return size_t(n_blocks) * block_bytes(); }
};

// A hash of all that decides what a block holds.
struct BlockName {
    uint64_t low = 0, high = 0;
    bool operator==(const BlockName&) const = default;
};

class Pool {
  public:
    // `devices`: as CacheConfig has it. Throws Error that says what to type if there is not enough memory.
    Pool(PoolShape shape, std::span<DeviceMemory* const> devices);

    const PoolShape& shape() const { return shape_; }
    size_t allocated() const { return allocated_; }
    size_t available() const { return free_.size() + kept_.size(); }
    size_t in_use() const { return references_.size() - available(); }
    size_t shared() const { return shared_; }  // blocks with more than one owner
    size_t kept() const { return kept_.size(); }
    uint64_t evicted() const { return evicted_; }

    uint32_t take();
    void hold(uint32_t id);  // a block that is in use or kept
    void release(uint32_t id);
    bool is_used(uint32_t id) const { return references_[id] > 0; }
    bool is_shared(uint32_t id) const { return references_[id] > 1; }

    bool is_named(uint32_t id) const { return names_[id].has_value(); }
    void name(uint32_t id, const BlockName& name);  // neither of them may be taken already
    void forget(uint32_t id);                       // a block in use loses its name, if it has one
    uint32_t find(const BlockName& name) const;     // kNoBlock: there is none
    bool equal(uint32_t a, uint32_t b) const;

    // Device pointers for a layer in the memory of a device; read() and write() take all of them.
    std::byte* base(int layer) const { return slabs_[layer].get(); }
    std::byte* block(int layer, uint32_t id) const { return base(layer) + id * shape_.slabs[layer].stride(); }
    std::byte* page(int layer, uint32_t id, int head) const {
        return block(layer, id) + size_t(head) * shape_.slabs[layer].format.bytes();
    }
    void copy(uint32_t from, uint32_t to);
    void clear(uint32_t id);
    void read(int layer, uint32_t id, std::byte* to) const;
    void write(int layer, uint32_t id, const std::byte* from);

  private:
    static constexpr std::align_val_t kAlignment{4096};
    struct Free {
        DeviceMemory* device = nullptr;
        void operator()(std::byte* memory) const {
            if (device) {
                device->free(memory);
            } else {
                ::operator delete(memory, kAlignment);
            }
        }
    };
    using Slab = std::unique_ptr<std::byte, Free>;
    DeviceMemory* device(int layer) const { return slabs_[layer].get_deleter().device; }

    PoolShape shape_;
    std::vector<Slab> slabs_;  // by model layer, null where there are no records
    size_t allocated_ = 0;
    std::vector<uint32_t> free_;        // a stack: what was used last is used first
    std::vector<uint32_t> references_;  // by block
    size_t shared_ = 0;

    struct Hash {
        size_t operator()(const BlockName& name) const { return size_t(name.low); }
    };
    std::unordered_map<BlockName, uint32_t, Hash> found_;
    std::vector<std::optional<BlockName>> names_;         // by block
    std::list<uint32_t> kept_;                            // the next to be evicted first
    std::vector<std::list<uint32_t>::iterator> places_;   // by block, of those that are kept
    uint64_t evicted_ = 0;
};

}  // namespace crumb
