// Blocks of one kind: a slab of memory a layer, a free list and reference counts. Block i is record i of every slab, so
// a block id is good for all layers. Memory is reserved at once and becomes physical when it is written.
//
// A block may have a name that says what it holds. It is found by it, and stays when its last reference goes: such kept
// blocks are as available as free ones, and are evicted when no other is free, the one that was released first before
// the others. A block in use is never evicted.
//
// The last blocks of a pool may lie in main memory while their layers are a device's, which then reads them over the bus:
// one range of addresses for it, so no kernel knows. Such blocks are taken last. When one would be, what was kept longest in
// the device's own memory moves there and makes room, and a kept block that is wanted again comes back.
#pragma once

#include <crumb/cache.h>
#include <crumb/page.h>

#include <cstddef>
#include <cstdint>
#include <map>
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
    int64_t n_host_blocks = 0;     // the last ones of these: in layers of a device they lie in main memory
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
    size_t available() const { return free_.size() + kept(); }
    size_t in_use() const { return references_.size() - available(); }
    size_t shared() const { return shared_; }  // blocks with more than one owner
    size_t kept() const { return kept_[0].size() + kept_[1].size(); }
    size_t on_host() const { return on_host_; }  // blocks in use that a device reads from main memory
    uint64_t evicted() const { return evicted_; }

    uint32_t take();
    uint32_t hold(uint32_t id);  // a block that is in use or kept; one that was kept may change its id to this
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
    bool is_host(uint32_t id) const { return int64_t(id) >= shape_.n_blocks - shape_.n_host_blocks; }
    uint32_t take_free();
    void add_free(uint32_t id);
    uint32_t evict();
    void refer(uint32_t id);  // the first reference
    void keep(uint32_t id, uint64_t since);
    void unkeep(uint32_t id) { kept_[is_host(id)].erase(since_[id]); }
    void move(uint32_t from, uint32_t to);  // a kept block's bytes, name and age to one that nobody has
    void exchange(uint32_t a, uint32_t b);  // of two kept blocks

    PoolShape shape_;
    std::vector<Slab> slabs_;  // by model layer, null where there are no records
    size_t allocated_ = 0;
    std::vector<uint32_t> free_;        // a heap: the lowest first
    std::vector<uint32_t> references_;  // by block
    size_t shared_ = 0, on_host_ = 0;

    struct Hash {
        size_t operator()(const BlockName& name) const { return size_t(name.low); }
    };
    std::unordered_map<BlockName, uint32_t, Hash> found_;
    std::vector<std::optional<BlockName>> names_;         // by block
    std::map<uint64_t, uint32_t> kept_[2];                // by release, the next to be evicted first; [1]: those in main memory
    std::vector<uint64_t> since_;                         // by block: the release since which it is kept
    uint64_t releases_ = 0, evicted_ = 0;
};

}  // namespace crumb
