#include "cache/pool.h"

#include <crumb/error.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include <sys/mman.h>

namespace crumb {

size_t PoolShape::block_bytes() const {
    size_t bytes = 0;
    for (const SlabShape& slab : slabs) {
        bytes += slab.stride();
    }
    return bytes;
}

Pool::Pool(PoolShape shape, std::span<DeviceMemory* const> devices)
    : shape_(std::move(shape)),
      slabs_(shape_.slabs.size()),
      free_(shape_.n_blocks),
      references_(shape_.n_blocks),
      names_(shape_.n_blocks),
      since_(shape_.n_blocks) {
    std::iota(free_.begin(), free_.end(), 0u);
    for (size_t layer = 0; layer < slabs_.size(); layer++) {
        const size_t bytes = free_.size() * shape_.slabs[layer].stride();
        if (bytes == 0) {
            continue;
        }
        if (DeviceMemory* device = devices.empty() ? nullptr : devices[layer]) {
            slabs_[layer] = Slab(device->allocate(bytes, size_t(shape_.n_host_blocks) * shape_.slabs[layer].stride()), Free{device});
            allocated_ += bytes;
            continue;
        }
        slabs_[layer].reset(static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow)));
        if (!slabs_[layer]) {
            fail(
                "no memory for the KV cache: its {} blocks take {:.1f} MiB ({} of 64 tokens) and layer {} got none. "
                "Use a "
                "smaller context (-c) or fewer sequences (-np)",
                shape_.name, double(shape_.bytes()) / (1 << 20), free_.size(), layer);
        }
        // A wish for large pages: with 4 KB each record costs a walk of the page tables or two, which made attention
        // over 8k tokens up to 2.5 times slower on a virtual machine (one run, other
        // work beside it). Without them all works.
        madvise(slabs_[layer].get(), bytes & ~size_t(4095), MADV_HUGEPAGE);
        allocated_ += bytes;
    }
}

uint32_t Pool::take_free() {
    std::ranges::pop_heap(free_, std::greater{});
    const uint32_t id = free_.back();
    free_.pop_back();
    return id;
}

uint32_t Pool::evict() {
    const bool host = kept_[0].empty() || (!kept_[1].empty() && kept_[1].begin()->first < kept_[0].begin()->first);
    const uint32_t id = kept_[host].begin()->second;
    unkeep(id);
    forget(id);
    evicted_++;
    return id;
}

void Pool::refer(uint32_t id) {
    references_[id] = 1;
    on_host_ += is_host(id);
}

void Pool::keep(uint32_t id, uint64_t since) {
    since_[id] = since;
    kept_[is_host(id)].emplace(since, id);
}

void Pool::move(uint32_t from, uint32_t to) {
    copy(from, to);
    const BlockName name = *names_[from];
    forget(from);
    unkeep(from);
    found_.emplace(name, to);
    names_[to] = name;
    keep(to, since_[from]);
}

void Pool::exchange(uint32_t a, uint32_t b) {
    std::vector<std::byte> one, other;
    for (int layer = 0; layer < int(slabs_.size()); layer++) {
        if (slabs_[layer]) {
            one.resize(shape_.slabs[layer].stride());
            other.resize(one.size());
            read(layer, a, one.data());
            read(layer, b, other.data());
            write(layer, b, one.data());
            write(layer, a, other.data());
        }
    }
    unkeep(a);
    unkeep(b);
    std::swap(names_[a], names_[b]);
    found_[*names_[a]] = a;
    found_[*names_[b]] = b;
    const uint64_t since_b = since_[b];
    keep(b, since_[a]);
    keep(a, since_b);
}

uint32_t Pool::take() {
    CRUMB_ASSERT(available() > 0);
    uint32_t id = free_.empty() ? evict() : take_free();
    if (is_host(id) && !kept_[0].empty()) {
        const uint32_t cold = kept_[0].begin()->second;
        move(cold, id);
        id = cold;
    }
    refer(id);
    return id;
}

uint32_t Pool::hold(uint32_t id) {
    CRUMB_ASSERT(id < references_.size() && (references_[id] > 0 || is_named(id)));
    if (references_[id] > 0) {
        shared_ += ++references_[id] == 2;
        return id;
    }
    if (is_host(id) && !free_.empty() && !is_host(free_.front())) {
        const uint32_t nearer = take_free();
        move(id, nearer);
        add_free(id);
        id = nearer;
    } else if (is_host(id) && !kept_[0].empty()) {
        const uint32_t cold = kept_[0].begin()->second;
        exchange(id, cold);
        id = cold;
    }
    unkeep(id);
    refer(id);
    return id;
}

void Pool::release(uint32_t id) {
    CRUMB_ASSERT(id < references_.size() && references_[id] > 0);
    references_[id]--;
    if (references_[id] > 0) {
        shared_ -= references_[id] == 1;
        return;
    }
    on_host_ -= is_host(id);
    if (is_named(id)) {
        keep(id, ++releases_);
    } else {
        add_free(id);
    }
}

void Pool::add_free(uint32_t id) {
    free_.push_back(id);
    std::ranges::push_heap(free_, std::greater{});
}

void Pool::name(uint32_t id, const BlockName& name) {
    CRUMB_ASSERT(is_used(id) && !is_named(id));
    CRUMB_ASSERT(found_.emplace(name, id).second);
    names_[id] = name;
}

void Pool::forget(uint32_t id) {
    if (is_named(id)) {
        found_.erase(*names_[id]);
        names_[id].reset();
    }
}

uint32_t Pool::find(const BlockName& name) const {
    const auto found = found_.find(name);
    return found == found_.end() ? kNoBlock : found->second;
}

bool Pool::equal(uint32_t a, uint32_t b) const {
    std::vector<std::byte> one, other;
    for (int layer = 0; layer < int(slabs_.size()); layer++) {
        const size_t bytes = shape_.slabs[layer].stride();
        if (!slabs_[layer]) {
            continue;
        }
        if (!device(layer)) {
            if (std::memcmp(block(layer, a), block(layer, b), bytes) != 0) {
                return false;
            }
            continue;
        }
        one.resize(bytes);
        other.resize(bytes);
        read(layer, a, one.data());
        read(layer, b, other.data());
        if (one != other) {
            return false;
        }
    }
    return true;
}

void Pool::copy(uint32_t from, uint32_t to) {
    for (int layer = 0; layer < int(slabs_.size()); layer++) {
        const size_t bytes = shape_.slabs[layer].stride();
        if (slabs_[layer] && device(layer)) {
            device(layer)->copy(block(layer, to), block(layer, from), bytes);
        } else if (slabs_[layer]) {
            std::memcpy(block(layer, to), block(layer, from), bytes);
        }
    }
}

void Pool::clear(uint32_t id) {
    for (int layer = 0; layer < int(slabs_.size()); layer++) {
        const size_t bytes = shape_.slabs[layer].stride();
        if (slabs_[layer] && device(layer)) {
            device(layer)->clear(block(layer, id), bytes);
        } else if (slabs_[layer]) {
            std::memset(block(layer, id), 0, bytes);
        }
    }
}

void Pool::read(int layer, uint32_t id, std::byte* to) const {
    const size_t bytes = shape_.slabs[layer].stride();
    if (device(layer)) {
        device(layer)->read(to, block(layer, id), bytes);
    } else {
        std::memcpy(to, block(layer, id), bytes);
    }
}

void Pool::write(int layer, uint32_t id, const std::byte* from) {
    const size_t bytes = shape_.slabs[layer].stride();
    if (device(layer)) {
        device(layer)->write(block(layer, id), from, bytes);
    } else {
        std::memcpy(block(layer, id), from, bytes);
    }
}

}  // namespace crumb
