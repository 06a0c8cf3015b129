#include "model/kv_cache.h"

#include <algorithm>

namespace tidewheel {

KvCache::KvCache(std::span<const Heads> layers, CacheType type, int num_blocks, const Ownership& ownership)
    : parts_(ownership.groups()) {
  for (int group = 0; group < ownership.groups(); ++group) {
    Part& part = parts_[group];
    whole_block_bytes_ = 0;
    for (const Heads& layer : layers) {
      const Range own = ownership.of(group, layer.num_kv_heads);
      const size_t head_bytes = layer.head_bytes(type);
      part.layers.push_back({own, head_bytes, part.block_bytes, whole_block_bytes_ + own.begin * head_bytes});
      part.block_bytes += part.layers.back().bytes();
      whole_block_bytes_ += layer.num_kv_heads * head_bytes;
    }
    part.memory = Arena(part.block_bytes * num_blocks);
  }
}

void KvCache::copy_block(int group, int from, int to) const {
  const Part& part = parts_[group];
  std::copy_n(part.memory.data() + size_t(from) * part.block_bytes, part.block_bytes,
              part.memory.data() + size_t(to) * part.block_bytes);
}

void KvCache::read_block(int group, int block, char* to) const {
  const Part& part = parts_[group];
  const char* const from = part.memory.data() + size_t(block) * part.block_bytes;
  for (const Layer& layer : part.layers) std::copy_n(from + layer.offset, layer.bytes(), to + layer.whole_offset);
}

void KvCache::write_block(int group, int block, const char* from) const {
  const Part& part = parts_[group];
  char* const to = part.memory.data() + size_t(block) * part.block_bytes;
  for (const Layer& layer : part.layers) std::copy_n(from + layer.whole_offset, layer.bytes(), to + layer.offset);
}

void KvCache::forget() {
  for (Part& part : parts_) part.memory.forget();
}

size_t KvCache::bytes() const {
  size_t total = 0;
  for (const Part& part : parts_) total += part.memory.bytes();
  return total;
}

}  // namespace tidewheel
