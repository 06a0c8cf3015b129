// What the parts of a decoder are built with, and what they compute with. The executor owns all of it.
#pragma once

#include <vector>

#include "model/attention_tasks.h"
#include "model/gemms.h"
#include "model/kv_cache.h"
#include "model/profile.h"
#include "model/require.h"
#include "model/ropes.h"
#include "model/state_slots.h"
#include "model/weights/weights.h"
#include "model/workspace.h"

namespace tidewheel {

// What the attention mixers of a model share. `caches` and `tasks` are made when every mixer has added its heads.
struct AttentionState {
  const CacheType cache_type;
  std::vector<std::vector<Heads>> heads;  // by cache group, of each attention in the order of the cache
  std::vector<Heads> divided;             // of each attention, as tasks take them: a KV head at a time
  std::vector<std::vector<int>> windows;  // by cache group, of each attention; 0: unlimited
  Ropes ropes;
  std::vector<KvCache> caches;  // [cache groups]
  AttentionTasks tasks;

  // What K and V of a layer are divided by in this type of cache. Throws std::invalid_argument.
  KvScales scales(const KvScales& wanted) const {
    if (cache_type != CacheType::kFloat8E4M3) return {};
    require(wanted.k >= 0x1p-64f && wanted.k <= 0x1p64f && wanted.v >= 0x1p-64f && wanted.v <= 0x1p64f,
            "the scales of K and V must be above 0");
    return wanted;
  }
};

// What each layer is told of each token of a step.
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
  StepAdapters& adapters;
  AttentionState& attention;
  StateSlots& states;
  Profile& profile;
  PerLayerInputs per_layer = {};
};

}  // namespace tidewheel
