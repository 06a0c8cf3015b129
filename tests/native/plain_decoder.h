// What a plan means, in double and as plainly as it can be said: one sequence, no cache, every score at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "model/plan.h"
#include "tensors.h"

namespace tidewheel::test {

class PlainDecoder {
 public:
  using Values = std::vector<double>;
  using Matrix = std::vector<Values>;  // [tokens, any size]

  PlainDecoder(const DecoderPlan& plan, const std::map<std::string, std::vector<float>>& tensors)
      : plan_(plan), tensors_(tensors) {}

  // The logits after each token.
  Matrix logits(const std::vector<int>& tokens) const {
    Matrix x(tokens.size());
    for (size_t t = 0; t < tokens.size(); ++t) x[t] = embed(tokens[t], static_cast<int>(t));
    for (size_t i = 0; i < plan_.layers.size(); ++i) {
      for (const ResidualBlockPlan& residual : plan_.layers[i]) {
        const std::string prefix = "layers." + std::to_string(i) + ".";
        add(x, mixed(prefix, residual, x));
        if (residual.sum_norm) x = norm(prefix + kind_of(residual) + "_sum_norm", *residual.sum_norm, x);
      }
    }
    if (plan_.final_norm) x = norm("final_norm", *plan_.final_norm, x);
    if (tensors_.contains("embed.project_out.weight")) x = linear("embed.project_out", x);
    x = linear(plan_.head.tied ? "embed" : "head", x);
    for (Values& row : x) {
      if (plan_.head.bias && plan_.head.tied) {
        for (size_t i = 0; i < row.size(); ++i) row[i] += tensors_.at("head.bias")[i];
      }
      for (double& y : row) {
        y /= plan_.head.divisor;
        if (plan_.head.softcap != 0) y = plan_.head.softcap * std::tanh(y / plan_.head.softcap);
      }
    }
    return x;
  }

 private:
  static void add(Matrix& x, const Matrix& more) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += more[t][i];
    }
  }

  Values embed(int token, int position) const {
    const EmbeddingPlan& embedding = plan_.embedding;
    const float* row = tensors_.at("embed.weight").data() + token * embedding.size;
    Values x(row, row + embedding.size);
    for (double& value : x) value *= embedding.scale;
    if (tensors_.contains("embed.project_in.weight")) x = linear("embed.project_in", {x})[0];
    for (int i = 0; embedding.num_positions && i < plan_.hidden_size; ++i) {
      x[i] += tensors_.at("embed.positions")[(position + embedding.position_offset) * plan_.hidden_size + i];
    }
    if (embedding.norm) x = norm("embed.norm", *embedding.norm, {x})[0];
    return x;
  }

  Matrix linear(const std::string& name, const Matrix& x) const {
    const std::vector<float>& weight = tensors_.at(name + ".weight");
    const size_t inputs = x[0].size(), outputs = weight.size() / inputs;
    const auto bias = tensors_.find(name + ".bias");
    Matrix y(x.size(), Values(outputs));
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t o = 0; o < outputs; ++o) {
        if (bias != tensors_.end()) y[t][o] = bias->second[o];
        for (size_t i = 0; i < inputs; ++i) y[t][o] += x[t][i] * weight[o * inputs + i];
      }
    }
    return y;
  }

  // Of every run of `size` values; 0: of the row. Each run has its own weights, or all have the same.
  Matrix norm(const std::string& name, const NormPlan& norm, Matrix x, size_t size = 0, bool each = false) const {
    for (Values& row : x) {
      const size_t run = size ? size : row.size();
      for (size_t begin = 0; begin < row.size(); begin += run) {
        double mean = 0, squares = 0;
        for (size_t i = 0; i < run; ++i) mean += norm.kind == NormKind::kLayer ? row[begin + i] / run : 0;
        for (size_t i = 0; i < run; ++i) squares += std::pow(row[begin + i] - mean, 2) / run;
        for (size_t i = 0; i < run; ++i) {
          double& value = row[begin + i];
          value = (value - mean) / std::sqrt(squares + norm.eps);
          const size_t at = each ? begin + i : i;
          if (norm.weight) value *= tensors_.at(name + ".weight")[at] + (norm.unit_offset ? 1.0 : 0.0);
          if (norm.bias) value += tensors_.at(name + ".bias")[at];
        }
      }
    }
    return x;
  }

  // What a residual block adds.
  Matrix mixed(const std::string& prefix, const ResidualBlockPlan& residual, const Matrix& x) const {
    const std::string kind = prefix + kind_of(residual);
    const Matrix input = residual.norm ? norm(kind + "_norm", *residual.norm, x) : x;
    Matrix y = std::visit([&](const auto& plan) { return mix(prefix, plan, input); }, residual.mixer);
    if (residual.post_norm) y = norm(kind + "_post_norm", *residual.post_norm, y);
    for (Values& row : y) {
      for (double& value : row) value *= residual.scale;
    }
    return y;
  }

  Matrix mix(const std::string& prefix, const ParallelPlan& plan, const Matrix& x) const {
    Matrix sum(x.size(), Values(x[0].size()));
    for (const ResidualBlockPlan& residual : plan.residuals) add(sum, mixed(prefix, residual, x));
    return sum;
  }

  Matrix mix(const std::string& prefix, const MlpPlan& plan, const Matrix& x) const {
    Matrix up = linear(prefix + "up", x), gate = plan.gated ? linear(prefix + "gate", x) : up;
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < up[t].size(); ++i) {
        up[t][i] = plan.gated ? activate(plan.activation, plan.gate_scale * gate[t][i]) * up[t][i]
                              : activate(plan.activation, up[t][i]);
      }
    }
    return linear(prefix + "down", up);
  }

  template <typename Plan>
  Matrix mix(const std::string&, const Plan&, const Matrix&) const {
    throw std::invalid_argument(std::string("plain decoders have no ") + Plan::kKind);
  }

  static double activate(Activation activation, double x) {
    switch (activation) {
      case Activation::kSilu: return x / (1 + std::exp(-x));
      case Activation::kGelu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      case Activation::kGeluTanh: return 0.5 * x * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
      case Activation::kGeluQuick: return x / (1 + std::exp(-1.702 * x));
      case Activation::kRelu: return std::max(x, 0.0);
      case Activation::kRelu2: return std::max(x, 0.0) * std::max(x, 0.0);
    }
    return 0;
  }

  Matrix mix(const std::string& prefix, const AttentionPlan& plan, const Matrix& x) const {
    Matrix q = linear(prefix + "q", x), k = linear(prefix + "k", x);
    const Matrix v = linear(prefix + "v", x);
    const int dim = plan.head_dim;
    const auto normalize = [&] {
      const size_t size = plan.qk_norm_over == QkNormOver::kWhole ? 0 : dim;
      const bool each = plan.qk_norm_over == QkNormOver::kEach;
      q = norm(prefix + "q_norm", *plan.qk_norm, q, size, each);
      k = norm(prefix + "k_norm", *plan.qk_norm, k, size, each);
    };
    if (plan.qk_norm && !plan.qk_norm_after_rope) normalize();
    for (size_t t = 0; plan.rope && t < x.size(); ++t) {
      rotate(*plan.rope, dim, static_cast<int>(t), q[t]);
      rotate(*plan.rope, dim, static_cast<int>(t), k[t]);
    }
    if (plan.qk_norm && plan.qk_norm_after_rope) normalize();
    for (size_t t = 0; plan.query_temperature && t < x.size(); ++t) {
      const int steps = (static_cast<int>(t) + plan.query_temperature->offset) / plan.query_temperature->length;
      for (double& value : q[t]) value *= 1 + plan.query_temperature->beta * std::log(1.0 + steps);
    }
    Matrix out(x.size(), Values(plan.q_size()));
    for (int t = 0; t < static_cast<int>(x.size()); ++t) {
      for (int head = 0; head < plan.num_heads; ++head) {
        const int kv = head / (plan.num_heads / plan.num_kv_heads) * dim;
        double total = plan.sinks ? std::exp(double{tensors_.at(prefix + "sinks")[head]}) : 0;
        for (int s = plan.sliding_window ? std::max(0, t + 1 - plan.sliding_window) : 0; s <= t; ++s) {
          double score = 0;
          for (int d = 0; d < dim; ++d) score += q[t][head * dim + d] * k[s][kv + d] * plan.scale;
          if (plan.softcap != 0) score = plan.softcap * std::tanh(score / plan.softcap);
          if (!plan.alibi_slopes.empty()) score += plan.alibi_slopes[head] * (s - t);
          total += std::exp(score);
          for (int d = 0; d < dim; ++d) out[t][head * dim + d] += std::exp(score) * v[s][kv + d];
        }
        for (int d = 0; d < dim; ++d) out[t][head * dim + d] /= total;
      }
    }
    return linear(prefix + "o", out);
  }

  static void rotate(const RopePlan& rope, int dim, int position, Values& heads) {
    const int pairs = static_cast<int>(rope.inv_freq.size());
    for (size_t head = 0; head < heads.size(); head += dim) {
      for (int i = 0; i < pairs; ++i) {
        double& first = heads[head + (rope.interleaved ? 2 * i : i)];
        double& second = heads[head + (rope.interleaved ? 2 * i + 1 : i + pairs)];
        const double angle = position * double{rope.inv_freq[i]}, a = first, b = second;
        first = (a * std::cos(angle) - b * std::sin(angle)) * rope.factor;
        second = (b * std::cos(angle) + a * std::sin(angle)) * rope.factor;
      }
    }
  }

  const DecoderPlan& plan_;
  const std::map<std::string, std::vector<float>>& tensors_;
};

}  // namespace tidewheel::test
