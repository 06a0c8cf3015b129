#include "model/mixers/experts.h"

#include <algorithm>
#include <cmath>

#include "model/weights/pack_source.h"

namespace tidewheel {
namespace {

// The number of tokens that one worker routes in less time than a barrier takes.
constexpr int kFewTokens = 4;
// The number of input elements that take about as long to pack as a barrier takes. Up to this number, every worker
// packs them for itself.
constexpr int kMaxRoutedAlone = 8192;
// Rows of a product that are added to the output while they are in the L1 cache.
constexpr int kAddedRows = 128;
constexpr size_t kTileBytes = size_t{kAddedRows} * kPanel * sizeof(float);

// A separate loop for a whole panel, because the compiler then knows the number of columns.
void add_row(float weight, const float* __restrict from, int columns, float* __restrict y) {
  if (columns == kPanel) {
    for (int c = 0; c < kPanel; ++c) y[c] += weight * from[c];
  } else {
    for (int c = 0; c < columns; ++c) y[c] += weight * from[c];
  }
}

size_t row_scratch(int inputs) { return round_up((inputs + kRowGroup) * sizeof(float), 64); }

}  // namespace

Experts::Experts(const ExpertsPlan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(plan),
      rows_(std::make_unique<RowsByExpert>(plan.num_experts, plan.experts_per_token)) {
  const RouterPlan& router = plan.router;
  require(plan.num_experts > 0 && plan.experts_per_token > 0 && plan.intermediate_size > 0 && plan.shared_size >= 0,
          "a mixture needs experts, of which some compute a token");
  require(router.num_groups > 0 && plan.num_experts % router.num_groups == 0 && router.kept_groups > 0 &&
              router.kept_groups <= router.num_groups,
          "experts must be in groups of equal size, of which some are kept");
  require(plan.experts_per_token <= plan.num_experts / router.num_groups * router.kept_groups,
          "a token cannot have more experts than can be chosen");
  require(!plan.sum_bias || context.attention.is_tower, "only in a tower a bias is added to the sum of experts' results");
  const int hidden = context.hidden_size, experts = plan.num_experts, most = plan.experts_per_token;
  const bool gated = plan.shared_size > 0 && plan.shared_gate;
  Weights& weights = context.weights;
  weights.add_linear(prefix + "router", router_, experts, hidden, router.bias, {experts + gated, experts, 0, 0});
  if (gated) weights.add_linear(prefix + "shared_gate", router_, 1, hidden, false, {experts + 1, 1, 0, experts});
  if (router.correction_bias) weights.add_vector(prefix + "router.correction_bias", correction_, experts);
  if (router.expert_scales) weights.add_vector(prefix + "router.expert_scales", scales_, experts);
  if (plan.sum_bias) weights.add_vector(prefix + "experts.bias", sum_bias_, hidden);
  weights.add_norm(prefix + "router_norm", router_norm_, plan.router_norm, hidden);
  weights.add_norm(prefix + "experts_input_norm", input_norm_, plan.input_norm, hidden);
  require(!plan.input_norm || plan.router_norm, "experts with a norm of their own have a router with one");
  for (int e = 0; e < experts; ++e) {
    Expert& expert = experts_.emplace_back();
    add_expert(prefix + "experts." + std::to_string(e) + ".", expert, plan.intermediate_size, plan.bias, plan.unpacked);
  }
  if (plan.shared_size > 0) {
    shared_ = std::make_unique<Expert>();
    add_expert(prefix + "shared.", *shared_, plan.shared_size, false, false);
  }
  up_packing_ = packing(&Expert::up, hidden, hidden);
  down_packing_ = packing(&Expert::down, plan.intermediate_size, plan.shared_size);
  Workspace& workspace = context.workspace;
  inputs_ = workspace.add<float>(round_up(hidden, 16));
  logits_ = workspace.add<float>(round_up(experts + gated, 16));
  choice_ = workspace.add<float>(experts + router.num_groups);
  chosen_ = workspace.add<int32_t>(most);
  weights_ = workspace.add<float>(most);
  token_of_ = workspace.add<int32_t>(most);
  weight_of_ = workspace.add<float>(most + 1);
  activated_ = workspace.add<float>(most * activated_stride(plan.intermediate_size) + activated_stride(plan.shared_size));
  packed_ = workspace.add<char>(std::max(up_packing_.token_bytes(most), down_packing_.token_bytes(most)));
  row_scratch_bytes_ = row_scratch(std::max({hidden, plan.intermediate_size, plan.shared_size}));
  size_t alone = 0;
  for (const Packing* packing : {&up_packing_, &down_packing_}) {
    alone = std::max(alone, packing->max_alone * packing->token_bytes(most));
  }
  panel_scratch_ = round_up(kTileBytes + 2 * row_scratch_bytes_ + alone, 64);
  size_t room = 0;
  for (const Expert& expert : experts_) {
    if (plan.unpacked) room = std::max({room, panel_room(context.kernels, expert.up), panel_room(context.kernels, expert.down)});
  }
  workspace.need_scratch(panel_scratch_ + room);
  context.adapters.need_experts(experts + (shared_ ? 1 : 0), most + (shared_ ? 1 : 0));
}

void Experts::add_expert(const std::string& prefix, Expert& expert, int size, bool bias, bool unpacked) {
  expert.up.unpacked = expert.down.unpacked = unpacked;
  Weights& weights = context_.weights;
  const int hidden = context_.hidden_size, columns = 2 * static_cast<int>(round_up(size, kGateColumns));
  if (plan_.gated) {
    weights.add_linear(prefix + "gate", expert.up, size, hidden, bias, {columns, kGateColumns, kPanel, 0});
    weights.add_linear(prefix + "up", expert.up, size, hidden, bias, {columns, kGateColumns, kPanel, kGateColumns});
  } else {
    weights.add_linear(prefix + "up", expert.up, size, hidden, bias);
  }
  weights.add_linear(prefix + "down", expert.down, hidden, size, bias);
  expert.size = size;
}

Experts::Packing Experts::packing(Linear Expert::*linear, int routed_inputs, int shared_inputs) const {
  const auto bytes = [&](const Expert& expert) {
    const Linear& matrix = expert.*linear;
    return round_up(context_.kernels.row_bytes(matrix.format, matrix.k), 64);
  };
  Packing packing;
  for (const Expert& expert : experts_) packing.routed_bytes = std::max(packing.routed_bytes, bytes(expert));
  if (shared_) packing.shared_bytes = bytes(*shared_);
  packing.max_alone = kMaxRoutedAlone / (plan_.experts_per_token * routed_inputs + (shared_ ? shared_inputs : 0));
  return packing;
}

void Experts::run(Worker& worker, const Step&, const Rows& input, const Output& output) const {
  const int tokens = input.count;
  StepAdapters& adapters = context_.adapters;
  const bool adapted = adapters.changes(experts_.front().up, shared_ ? shared_->down : experts_.back().down);
  if (plan_.router_norm) {  // it reads rows without the input norm, which the output may overwrite
    require(input.norm.kind == NormKind::kNone, "a router with a norm of its own reads what is not normalized");
    compute_logits(worker, {input.x, input.stride, tokens, input.gather, router_norm_, input.turn});
  }
  copy_inputs(worker, input, output);
  context_.profile.end(worker, Phase::kNorm);
  if (!plan_.router_norm) compute_logits(worker, {inputs(0), inputs_.stride, tokens, nullptr, {}, input.turn});
  choose(worker, input, adapted);
  context_.profile.end(worker, Phase::kRoute);
  if (!context_.capture.empty()) capture_up(worker, tokens);
  const LowRankRow* low_rank = adapted ? adapters.project_up(worker, inputs(0), inputs_.stride) : nullptr;
  pack(worker, up_packing_, tokens, [&](const Block& block, int begin, int end) { pack_input(worker, block, begin, end); });
  multiply_up(worker, tokens, low_rank);
  context_.profile.end(worker, Phase::kUp);
  if (!context_.capture.empty()) capture_down(worker, tokens);
  if (adapted) low_rank = adapters.project_down(worker);
  pack(worker, down_packing_, tokens, [&](const Block& block, int begin, int end) { pack_activated(worker, block, begin, end); });
  multiply_down(worker, tokens, low_rank, output);
  context_.profile.end(worker, Phase::kDown);
}

void Experts::compute_logits(Worker& worker, Rows rows) const {
  Output output{Epilogue::kStore, context_.workspace.rows(logits_), logits_.stride};
  output.scale = plan_.router_input_scale;
  context_.gemms.run(worker, router_, rows, output);
}

// The experts read a copy, because they may add to the rows that they were given.
void Experts::copy_inputs(Worker& worker, const Rows& input, const Output& output) const {
  const int size = context_.hidden_size;
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* x = inputs(static_cast<int>(row));
      std::copy_n(input.row(row), size, x);
      if (input.norm.kind != NormKind::kNone) context_.kernels.normalize(input.norm, x, size);
      if (input_norm_.kind != NormKind::kNone) context_.kernels.normalize(input_norm_, x, size);
      float* y = output.y + row * output.stride;
      if (output.epilogue == Epilogue::kStore) std::fill_n(y, size, 0.0f);
      for (int i = 0; sum_bias_ && i < size; ++i) y[i] += output.scale * sum_bias_[i];
    }
  });
}

void Experts::choose(Worker& worker, const Rows& input, bool adapted) const {
  const int tokens = input.count;
  const auto sort = [&] {
    const Workspace& workspace = context_.workspace;
    rows_->sort(tokens, workspace.rows(chosen_), workspace.rows(weights_), workspace.rows(token_of_), workspace.rows(weight_of_));
    if (adapted) assign_adapters(worker, input);
  };
  if (tokens <= kFewTokens) {
    worker.share(1, 1, [&](int64_t, int64_t) {
      for (int token = 0; token < tokens; ++token) route_token(token, tokens);
      sort();
    });
    return;
  }
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) route_token(static_cast<int>(token), tokens);
  });
  worker.share(1, 1, [&](int64_t, int64_t) { sort(); });
}

void Experts::assign_adapters(const Worker& worker, const Rows& input) const {
  const int tokens = input.count;
  context_.adapters.begin_experts(input.turn == Rows::kRead);
  for (int i = 0; i < num_blocks(); ++i) {
    const Block rows = block(worker, up_packing_, i, tokens);
    const float* weights = plan_.weighs_input && rows.tokens ? rows.weights : nullptr;
    context_.adapters.add_expert(
        {&rows.expert->up, &rows.expert->down, rows.begin, rows.count, rows.tokens, weights, rows.activated, rows.stride});
  }
}

void Experts::route_token(int token, int tokens) const {
  const Workspace& workspace = context_.workspace;
  float* logits = workspace.rows(logits_) + token * logits_.stride;
  if (shared_) {
    float* shared_weights = workspace.rows(weight_of_) + size_t(tokens) * plan_.experts_per_token;
    shared_weights[token] = plan_.shared_gate ? 1.0f / (1.0f + std::exp(-logits[plan_.num_experts])) : 1.0f;
  }
  route(plan_.router, plan_.num_experts, plan_.experts_per_token, logits, correction_, scales_,
        workspace.rows(choice_) + token * choice_.stride, workspace.rows(chosen_) + token * chosen_.stride,
        workspace.rows(weights_) + token * weights_.stride);
}

int Experts::num_blocks() const { return static_cast<int>(rows_->used().size()) + (shared_ ? 1 : 0); }

Experts::Block Experts::block(const Worker& worker, const Packing& packing, int index, int tokens) const {
  const Workspace& workspace = context_.workspace;
  char* const alone = workspace.scratch(worker) + kTileBytes + 2 * row_scratch_bytes_;
  char* const packed = tokens <= packing.max_alone ? alone : workspace.rows(packed_);
  const size_t routed = size_t(tokens) * plan_.experts_per_token;
  const size_t stride = activated_stride(plan_.intermediate_size);
  float* activated = workspace.rows(activated_);
  const float* weights = workspace.rows(weight_of_);
  if (index == static_cast<int>(rows_->used().size())) {
    return {shared_.get(), static_cast<int>(routed), tokens, nullptr, weights + routed, activated + routed * stride,
            activated_stride(plan_.shared_size), packed + routed * packing.routed_bytes};
  }
  const int expert = rows_->used()[index], begin = rows_->begin(expert);
  return {&experts_[expert], begin, rows_->count(expert), workspace.rows(token_of_) + begin, weights + begin,
          activated + begin * stride, stride, packed + begin * packing.routed_bytes};
}

template <typename PackRows>
void Experts::pack(Worker& worker, const Packing& packing, int tokens, PackRows&& pack_rows) const {
  // Packs the tiles of all blocks that begin within these rows.
  const auto pack_some = [&](int64_t begin, int64_t end) {
    for (int i = 0; i < num_blocks(); ++i) {
      const Block rows = block(worker, packing, i, tokens);
      const int last = static_cast<int>(std::min<int64_t>(end - rows.begin, rows.count));
      if (last <= 0 || begin >= rows.begin + rows.count) continue;
      pack_rows(rows, static_cast<int>(std::max<int64_t>(begin - rows.begin, 0)), last);
    }
  };
  const int64_t count = int64_t{tokens} * (plan_.experts_per_token + (shared_ ? 1 : 0));
  if (tokens <= packing.max_alone) {
    if (!worker.is_late()) pack_some(0, count);
  } else {
    worker.share(count, std::clamp<int64_t>(count / 64, 1, 64), pack_some);
  }
}

// Packs the block's tiles that begin in rows `begin` to `end` - 1. Where rows cannot be packed as they are stored,
// `fill(row, out)` returns the row.
template <typename Fill>
void Experts::pack_tiles(Worker& worker, const Linear& linear, const Block& block, PackInputsArgs args, int begin, int end,
                         bool as_it_lies, Fill&& fill) const {
  const int tile = context_.kernels.tile_rows(linear.format);
  const int first = static_cast<int>(round_up(begin, tile));
  const int last = std::min(block.count, static_cast<int>(round_up(end, tile)));
  if (first >= last) return;
  char* const scratch = context_.workspace.scratch(worker) + kTileBytes;
  args.num_rows = block.count;
  args.k = linear.k;
  args.scratch = reinterpret_cast<float*>(scratch);
  args.out = block.packed;
  if (as_it_lies && !linear.input_order) {
    context_.kernels.pack_inputs(linear.format, args, first, last);
    return;
  }
  float* const filled = reinterpret_cast<float*>(scratch + row_scratch_bytes_);
  for (int row = first; row < last; ++row) {
    const float* x = fill(row, filled);
    if (linear.input_order) {
      float* ordered = args.scratch;  // unused until the row is packed
      for (int i = 0; i < linear.k; ++i) ordered[i] = x[(*linear.input_order)[i]];
      std::copy_n(ordered, linear.k, filled);
      x = filled;
    }
    args.x = x, args.x_stride = 0, args.gather = nullptr;
    context_.kernels.pack_inputs(linear.format, args, row, row + 1);
  }
}

void Experts::pack_input(Worker& worker, const Block& block, int begin, int end) const {
  PackInputsArgs args{};
  args.x = inputs(0), args.x_stride = inputs_.stride, args.gather = block.tokens;
  const bool weighed = plan_.weighs_input && block.tokens;
  pack_tiles(worker, block.expert->up, block, args, begin, end, !weighed,
             [&](int row, float* out) { return input_row(block, row, out); });
}

const float* Experts::input_row(const Block& block, int row, float* out) const {
  const float* x = inputs(block.tokens ? block.tokens[row] : row);
  if (!plan_.weighs_input || !block.tokens) return x;
  for (int i = 0; i < context_.hidden_size; ++i) out[i] = block.weights[row] * x[i];
  return out;
}

void Experts::capture_up(Worker& worker, int tokens) const {
  for (int i = 0; i < num_blocks(); ++i) {
    const Block rows = block(worker, up_packing_, i, tokens);
    context_.capture.keep(worker, rows.expert->up, rows.count, [&](int row, float* out) {
      const float* x = input_row(rows, row, out);
      if (x != out) std::copy_n(x, context_.hidden_size, out);
    });
  }
}

void Experts::capture_down(Worker& worker, int tokens) const {
  for (int i = 0; i < num_blocks(); ++i) {
    const Block rows = block(worker, down_packing_, i, tokens);
    context_.capture.keep(worker, rows.expert->down, rows.count,
                          [&](int row, float* out) { std::copy_n(rows.activated + row * rows.stride, rows.expert->size, out); });
  }
}

void Experts::pack_activated(Worker& worker, const Block& block, int begin, int end) const {
  PackInputsArgs args{};
  args.x = block.activated, args.x_stride = block.stride;
  pack_tiles(worker, block.expert->down, block, args, begin, end, true,
             [&](int row, float*) -> const float* { return block.activated + row * block.stride; });
}

const char* Experts::panel(const Worker& worker, const Linear& linear, int index) const {
  const Linear::Slice& slice = linear.slices[worker.group()];
  if (!linear.unpacked) return slice.weight + index * context_.kernels.panel_bytes(linear.format, linear.k);
  return pack_panel(context_.kernels, linear, slice.panels.begin + index, context_.workspace.scratch(worker) + panel_scratch_);
}

void Experts::multiply_up(Worker& worker, int tokens, const LowRankRow* low_rank) const {
  const int group = worker.group();
  const auto panels_of = [&](const Expert& expert) { return int64_t{expert.up.slices[group].panels.size()}; };
  const int64_t panels = panels_of(experts_[0]), shared_panels = shared_ ? panels_of(*shared_) : 0;
  const int64_t routed = worker.is_late() ? 0 : panels * static_cast<int64_t>(rows_->used().size());
  // The shared expert has more rows than the others, so it comes first: pieces shrink towards the end.
  worker.share_ranges_in_group(shared_panels + routed, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const bool is_shared = begin < shared_panels;
      const int64_t at = is_shared ? begin : begin - shared_panels;
      const int index = static_cast<int>(is_shared ? rows_->used().size() : at / panels);
      const int panel = static_cast<int>(is_shared ? at : at % panels);
      const int panel_end = static_cast<int>(std::min((is_shared ? shared_panels : panels), panel + (end - begin)));
      const Block rows = block(worker, up_packing_, index, tokens);
      const Linear& up = rows.expert->up;
      const Linear::Slice& slice = up.slices[group];
      const int first_column = slice.panels.begin * kPanel;
      const int columns = std::min(up.n, slice.panels.end * kPanel) - first_column;
      const int block_rows = context_.kernels.row_block(up.format, up.k);
      const int together = up.unpacked ? 1 : panel_end - panel;  // consecutive panels
      for (int first = panel; first < panel_end; first += together) {
        const char* weight = this->panel(worker, up, first);
        const int column = first_column + first * kPanel;
        for (int row = 0; row < rows.count; row += block_rows) {
          GemmArgs args{};
          args.x = rows.packed, args.row_begin = row, args.row_end = std::min(rows.count, row + block_rows);
          args.weight = weight, args.k = up.k, args.n = columns - first * kPanel;
          args.panel_end = together;
          args.bias = up.bias ? up.bias + column : nullptr;
          args.epilogue = plan_.gated ? Epilogue::kGated : Epilogue::kActivation;
          args.activation = is_shared ? plan_.shared_activation : plan_.activation;
          args.swiglu_limit = is_shared ? 0 : plan_.swiglu_limit;
          args.y = rows.activated + (plan_.gated ? column / 2 : column), args.y_stride = rows.stride;
          args.low_rank = low_rank ? low_rank + rows.begin : nullptr;
          args.low_rank_panel = slice.panels.begin + first;
          context_.kernels.gemm(up.format, args);
        }
      }
      begin += panel_end - panel;
    }
  });
}

void Experts::multiply_down(Worker& worker, int tokens, const LowRankRow* low_rank, const Output& output) const {
  const int64_t panels = experts_[0].down.slices[worker.group()].panels.size();
  worker.share_ranges_in_group(panels, [&](int64_t begin, int64_t end) {
    for (int i = 0; i < num_blocks(); ++i) {
      const Block rows = block(worker, down_packing_, i, tokens);
      add_down(worker, rows, static_cast<int>(begin), static_cast<int>(end), low_rank, output);
    }
  });
}

void Experts::add_down(Worker& worker, const Block& rows, int panel_begin, int panel_end, const LowRankRow* low_rank,
                       const Output& output) const {
  const Kernels& kernels = context_.kernels;
  const Linear& down = rows.expert->down;
  const Linear::Slice& slice = down.slices[worker.group()];
  const size_t row_bytes = kernels.row_bytes(down.format, down.k);
  const int tile_rows = kernels.tile_rows(down.format), block_rows = std::max(1, kAddedRows / tile_rows) * tile_rows;
  float* const tile = reinterpret_cast<float*>(context_.workspace.scratch(worker));
  const bool weighs = !plan_.weighs_input || !rows.tokens;
  for (int first = 0; first < rows.count; first += block_rows) {
    const int count = std::min(block_rows, rows.count - first);
    for (int panel = panel_begin; panel < panel_end; ++panel) {
      const int column = (slice.panels.begin + panel) * kPanel, columns = std::min(kPanel, down.n - column);
      GemmArgs args{};
      args.x = rows.packed + first * row_bytes, args.row_end = count;
      args.weight = this->panel(worker, down, panel), args.k = down.k, args.n = columns;
      args.panel_end = 1;
      args.bias = down.bias ? down.bias + column : nullptr;
      args.epilogue = Epilogue::kStore;
      args.y = tile, args.y_stride = kPanel;
      args.low_rank = low_rank ? low_rank + rows.begin + first : nullptr;
      args.low_rank_panel = slice.panels.begin + panel;
      kernels.gemm(down.format, args);
      for (int row = 0; row < count; ++row) {
        const int token = rows.tokens ? rows.tokens[first + row] : first + row;
        const float weight = output.scale * (weighs ? rows.weights[first + row] : 1.0f);
        add_row(weight, tile + row * kPanel, columns, output.y + token * output.stride + column);
      }
    }
  }
}

}  // namespace tidewheel
