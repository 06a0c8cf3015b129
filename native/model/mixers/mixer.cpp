#include "model/mixers/mixer.h"

#include "model/mixers/alt_up.h"
#include "model/mixers/attention.h"
#include "model/mixers/delta_net.h"
#include "model/mixers/mamba2.h"
#include "model/mixers/experts.h"
#include "model/mixers/latent_attention.h"
#include "model/mixers/laurel.h"
#include "model/mixers/mlp.h"
#include "model/mixers/parallel.h"
#include "model/mixers/short_conv.h"
#include "model/mixers/per_layer.h"

namespace tidewheel {
namespace {

using Made = std::unique_ptr<const Mixer>;

struct Maker {
  const std::string& prefix;
  Context& context;

  Made operator()(const AttentionPlan& plan) const { return std::make_unique<Attention>(plan, prefix, context); }
  Made operator()(const LatentAttentionPlan& plan) const { return std::make_unique<LatentAttention>(plan, prefix, context); }
  Made operator()(const LaurelPlan& plan) const { return std::make_unique<Laurel>(plan, prefix, context); }
  Made operator()(const AltUpPlan& plan) const { return std::make_unique<AltUp>(plan, prefix, context); }
  Made operator()(const MlpPlan& plan) const { return std::make_unique<Mlp>(plan, prefix, context); }
  Made operator()(const ExpertsPlan& plan) const { return std::make_unique<Experts>(plan, prefix, context); }
  Made operator()(const ParallelPlan& plan) const { return std::make_unique<Parallel>(plan, prefix, context); }
  Made operator()(const DeltaNetPlan& plan) const { return std::make_unique<DeltaNet>(plan, prefix, context); }
  Made operator()(const Mamba2Plan& plan) const { return std::make_unique<Mamba2>(plan, prefix, context); }
  Made operator()(const ShortConvPlan& plan) const { return std::make_unique<ShortConv>(plan, prefix, context); }
  Made operator()(const PerLayerPlan& plan) const { return std::make_unique<PerLayer>(plan, prefix, context); }
};

}  // namespace

std::unique_ptr<const Mixer> make_mixer(const MixerPlan& plan, const std::string& prefix, Context& context) {
  return std::visit(Maker{prefix, context}, plan);
}

}  // namespace tidewheel
