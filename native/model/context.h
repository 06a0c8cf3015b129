// The objects that the parts of a decoder are built with and compute with. The executor owns all of them.
#pragma once

#include <vector>

#include "model/attention_tasks.h"
#include "model/gemms.h"
#include "model/input_capture.h"
#include "model/kv_cache.h"
#include "model/profile.h"
#include "model/require.h"
#include "model/ropes.h"
#include "model/state_slots.h"
#include "model/weights/weights.h"
#include "model/workspace.h"

namespace tidewheel {

// What a model's attention mixers share. `caches` and `tasks` are created after every mixer has added its heads.
struct AttentionState {
  const CacheType cache_type;
  std::vector<std::vector<Heads>> heads;  // by cache group: each attention layer's heads, in the order of the cache
  std::vector<Heads> divided;             // of each attention layer, as tasks take them: one KV head at a time
  std::vector<std::vector<int>> windows;  // by cache group, of each attention layer; 0: unlimited
  Ropes ropes;
  std::vector<KvCache> caches;  // [cache groups]
  AttentionTasks tasks;
  AttentionTasks read_tasks = {};  // of Step::read_rows alone
  // In a tower nothing of a layer is needed once the next one runs. So layers with the same heads have one layer of the
  // cache, and the queries of all rows of a segment have memory of their own.
  const bool is_tower = false;
  size_t query_bytes = 0;  // of a row, in the layer with the most; for towers
  Arena queries = {};      // [rows, query_bytes], for towers
  size_t position_floats = 0;  // of a row, in the layer with the most; for towers
  Arena positions = {};        // [rows and a block, position_floats]: see Disentangled

  // The divisors for a layer's K and V with this type of cache. Throws std::invalid_argument.
  KvScales scales(const KvScales& wanted) const {
    if (cache_type != CacheType::kFloat8E4M3) return {};
    require(wanted.k >= 0x1p-64f && wanted.k <= 0x1p64f && wanted.v >= 0x1p-64f && wanted.v <= 0x1p64f,
            "the scales of K and V must be above 0");
    return wanted;
  }
};

// The per-layer embeddings of a step's tokens.
struct PerLayerInputs {
  Buffer<float> rows;  // [T, layers, size]
  int layers = 0, size = 0;
};

struct Context {
  const Kernels& kernels;
  const int hidden_size;
  Weights& weights;
  Workspace& workspace;
  Gemms& gemms;
  InputCapture& capture;
  StepAdapters& adapters;
  AttentionState& attention;
  StateSlots& states;
  Profile& profile;
  PerLayerInputs per_layer = {};
};

}  // namespace tidewheel
