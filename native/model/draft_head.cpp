#include "model/draft_head.h"

#include <algorithm>

#include "model/require.h"

namespace tidewheel {

DraftHead::DraftHead(Context& context, int width, int num_draft_tokens) : context_(context), width_(width), num_rows_(1 + num_draft_tokens) {
  require(context.attention.heads.size() == 1, "a layer that predicts tokens needs a cache of one group");
  require(num_draft_tokens > 0, "there must be at least one draft token");
}

void DraftHead::allocate(int max_sequences) {
  rows_.allocate(max_sequences, num_rows_, width_);
  predicted_ = Arena(size_t(max_sequences) * width_ * sizeof(float));
}

void DraftHead::begin(const Step& step) {
  before_.assign(step.token_ids.size(), {});
  unknown_.clear();
  for (int s = 0; s < static_cast<int>(step.context_len.size()); ++s) {
    const int first = step.query_start[s];
    const float* row = rows_.before(step, s);
    before_[first] = {row, row != nullptr};
    if (!row) unknown_.push_back(first);
  }
  rows_.begin(step);
}

void DraftHead::begin_prediction(const Step& step, std::span<const int> from) {
  before_.clear(), unknown_.clear();
  for (int s = 0; s < static_cast<int>(step.context_len.size()); ++s) {
    const float* row = from.empty() ? rows_.before(step, s) : predicted() + size_t(from[s]) * width_;
    before_.push_back({row, row != nullptr});
    if (!row) unknown_.push_back(s);
  }
}

void DraftHead::keep(Worker& worker, const float* rows, const Norm& norm) const {
  const auto kept = rows_.kept();
  worker.share(static_cast<int64_t>(kept.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::copy_n(rows + size_t(kept[i].token) * width_, width_, kept[i].row);
      if (norm.kind != NormKind::kNone) context_.kernels.normalize(norm, kept[i].row, width_);
    }
  });
  context_.profile.end(worker, Phase::kNorm);
}

void DraftHead::turn(Worker& worker, const Step& step) const {
  worker.share(static_cast<int64_t>(step.token_ids.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Adapter* const adapter = context_.adapters.of_token(t);
      context_.attention.ropes.compute(step, static_cast<int>(t), adapter ? adapter->rope_factor() : 1);
    }
  });
}

}  // namespace tidewheel
