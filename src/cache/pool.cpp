#include "cache/pool.h"

#include <crumb/error.h>

#include <cstring>

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
      places_(shape_.n_blocks) {
    for (size_t i = 0; i < free_.size(); i++) {
        free_[i] = uint32_t(free_.size() - 1 - i);
    }
    for (size_t layer = 0; layer < slabs_.size(); layer++) {
        const size_t bytes = free_.size() * shape_.slabs[layer].stride();
        if (bytes == 0) {
            continue;
        }
        if (DeviceMemory* device = devices.empty() ? nullptr : devices[layer]) {
            slabs_[layer] = Slab(device->allocate(bytes), Free{device});
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

uint32_t Pool::take() {
    CRUMB_ASSERT(available() > 0);
    uint32_t id = kNoBlock;
    if (!free_.empty()) {
        id = free_.back();
        free_.pop_back();
    } else {
        id = kept_.front();
        kept_.pop_front();
        evicted_++;
        forget(id);
    }
    references_[id] = 1;
    return id;
}

void Pool::hold(uint32_t id) {
    CRUMB_ASSERT(id < references_.size() && (references_[id] > 0 || is_named(id)));
    references_[id]++;
    if (references_[id] == 1) {
        kept_.erase(places_[id]);
    } else if (references_[id] == 2) {
        shared_++;
    }
}

void Pool::release(uint32_t id) {
    CRUMB_ASSERT(id < references_.size() && references_[id] > 0);
    references_[id]--;
    if (references_[id] == 1) {
        shared_--;
    } else if (references_[id] == 0 && is_named(id)) {
        places_[id] = kept_.insert(kept_.end(), id);
    } else if (references_[id] == 0) {
        free_.push_back(id);
    }
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
