// W_O of a model's layers, for the local metric.
#pragma once

#include <crumb/local_metric.h>

struct llama_model;

namespace crumb::llama {

// Gives `metric` the output weights of every layer whose rows the cache codes, dequantised. `model` was loaded with
// Load::mapped. Throws Error, which says why and what to type instead, if attention is not a plain softmax over a
// layer's own K and V with one matrix behind it.
void set_projections(LocalMetric& metric, const llama_model& model);

}  // namespace crumb::llama
