#include "model/kv_cache.h"

#include <algorithm>

namespace tidewheel {

KvCache::KvCache(std::span<const Heads> layers, CacheType type, int num_blocks, const Ownership& ownership)
    : parts_(ownership.groups()) {
  for (int group = 0; group < ownership.groups(); ++group) {
    Part& part = parts_[group];
    for (const Heads& layer : layers) {
      const Range own = ownership.of(group, layer.num_kv_heads);
      part.layers.push_back({own, layer.head_bytes(type), part.block_bytes});
      part.block_bytes += own.size() * part.layers.back().head_bytes;
    }
    part.memory = Arena(part.block_bytes * num_blocks);
  }
}

void KvCache::copy_block(int group, int from, int to) const {
  const Part& part = parts_[group];
  std::copy_n(part.memory.data() + size_t(from) * part.block_bytes, part.block_bytes,
              part.memory.data() + size_t(to) * part.block_bytes);
}

size_t KvCache::bytes() const {
  size_t total = 0;
  for (const Part& part : parts_) total += part.memory.bytes();
  return total;
}

}  // namespace tidewheel
