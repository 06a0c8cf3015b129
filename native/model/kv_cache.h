// The KV cache. A block holds all attention layers. Each group of workers has a part of every block, with the KV heads
// that it owns. Only this group writes to its part, so the part is in the memory of the group's node.
#pragma once

#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/arena.h"
#include "runtime/groups.h"

namespace tidewheel {

class KvCache {
 public:
  KvCache() = default;
  // Throws std::bad_alloc.
  KvCache(std::span<const Heads> layers, CacheType type, int num_blocks, const Ownership& ownership);

  // The KV heads of a layer that the group owns.
  Range heads(int group, int layer) const { return parts_[group].layers[layer].heads; }
  // A KV head's part of the layer in a block. Its part of the next block is `block_bytes(group)` bytes further.
  char* head(int group, int layer, int block, int kv_head) const {
    const Part& part = parts_[group];
    const Layer& place = part.layers[layer];
    return part.memory.data() + size_t(block) * part.block_bytes + place.offset +
           size_t(kv_head - place.heads.begin) * place.head_bytes;
  }
  size_t block_bytes(int group) const { return parts_[group].block_bytes; }

  // Copies the group's part of a block.
  void copy_block(int group, int from, int to) const;
  // The same, out of the cache and into it. Outside of the cache, a block has `whole_block_bytes` bytes: layer by
  // layer, and within a layer head by head, independent of how heads are divided among groups.
  void read_block(int group, int block, char* to) const;
  void write_block(int group, int block, const char* from) const;
  size_t whole_block_bytes() const { return whole_block_bytes_; }

  size_t bytes() const;
  // Gives the memory back until it is used again. What was in the blocks is lost.
  void forget();
  const Arena& memory(int group) const { return parts_[group].memory; }

 private:
  struct Layer {
    Range heads;
    size_t head_bytes, offset;
    size_t whole_offset;  // the offset of the group's heads in a whole block

    size_t bytes() const { return heads.size() * head_bytes; }
  };
  // A block holds all layers, so a growing sequence touches new memory in small steps.
  struct Part {
    std::vector<Layer> layers;
    size_t block_bytes = 0;
    Arena memory;
  };

  std::vector<Part> parts_;  // [groups]
  size_t whole_block_bytes_ = 0;
};

}  // namespace tidewheel
