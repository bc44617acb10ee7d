// The C API of calibration.
#include <crumb/calibrate.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "calibrate/fingerprint.h"
#include "capi/layer.h"

struct crumb_calibration {
    crumb_calibration(int skip_, int n_threads_) : skip(skip_), n_threads(n_threads_), moments(skip_, n_threads_) {}

    int skip, n_threads;
    crumb::Moments moments;
    std::array<crumb::Metric, crumb::kFolds> metrics;
    crumb::Fingerprint text;
    crumb::TextSketch sketch;
    uint64_t tokens = 0;
};

namespace crumb::capi {

namespace {

HeadRows packed(const float* rows, int n_head, int dim, const char* what) {
    return {&need(rows, what), size_t(n_head) * size_t(dim), size_t(dim)};
}

std::vector<double> matrix_of(const double* matrices, int head, int dim) {
    const size_t size = size_t(dim) * size_t(dim);
    return std::vector<double>(matrices + size_t(head) * size, matrices + size_t(head + 1) * size);
}

void check_fold(int fold) {
    if (fold < 0 || fold >= kFolds) fail("part {} of the text: there are {}", fold, kFolds);
}

}  // namespace

}  // namespace crumb::capi

using namespace crumb;
using namespace crumb::capi;

extern "C" {

crumb_status crumb_calibration_create(int skip, int n_threads, crumb_calibration** calibration) {
    return guard([&] {
        need(calibration, "calibration") = nullptr;
        if (skip < 0 || n_threads < 1) fail("{} tokens left out and {} threads", skip, n_threads);
        *calibration = new crumb_calibration(skip, n_threads);
    });
}

void crumb_calibration_destroy(crumb_calibration* calibration) { delete calibration; }

crumb_status crumb_calibration_begin(crumb_calibration* calibration, int fold, const int32_t* tokens, int n_tokens) {
    return guard([&] {
        crumb_calibration& c = need(calibration, "calibration");
        check_fold(fold);
        if (n_tokens < 1) fail("a sequence of {} tokens", n_tokens);
        const std::span<const int32_t> text(&need(tokens, "tokens"), size_t(n_tokens));
        c.text.add_value(uint64_t(text.size()));
        c.text.add(std::as_bytes(text));
        c.sketch.add(text);
        c.tokens += uint64_t(std::max(0, n_tokens - c.skip));
        c.moments.begin_sequence(fold);
    });
}

crumb_status crumb_calibration_observe(crumb_calibration* calibration, const crumb_layer_shape* shape, int n_tokens,
                                       const float* q, const float* k, const float* v, const float* output) {
    return guard([&] {
        const crumb_layer_shape& s = need(shape, "shape");
        check(s);
        if (n_tokens < 0) fail("{} tokens of layer {}: there must be 0 or more", n_tokens, s.layer);
        need(calibration, "calibration")
            .moments.observe(s.layer, {s.n_head, s.n_head_kv, s.dim_k, s.dim_v},
                             {n_tokens, packed(q, s.n_head, s.dim_k, "q"), packed(k, s.n_head_kv, s.dim_k, "k"),
                              packed(v, s.n_head_kv, s.dim_v, "v"), packed(output, s.n_head, s.dim_v, "output")});
    });
}

crumb_status crumb_calibration_metric(crumb_calibration* calibration, const crumb_layer_shape* shape, int fold, uint64_t n_rows,
                                      const double* k, const double* v) {
    return guard([&] {
        const crumb_layer_shape& s = need(shape, "shape");
        check(s);
        check_fold(fold);
        LayerMetric metric;
        metric.tokens = n_rows;
        for (int h = 0; h < s.n_head_kv; h++) {
            metric.heads.push_back({matrix_of(&need(k, "k"), h, s.dim_k), matrix_of(&need(v, "v"), h, s.dim_v)});
        }
        need(calibration, "calibration").metrics[size_t(fold)][s.layer] = std::move(metric);
    });
}

crumb_status crumb_calibration_write(const crumb_calibration* calibration, const crumb_model_identity* model, const char* texts,
                                     const char* metric, const int* layers, int n_layers, const char* file) {
    return guard([&] {
        const crumb_calibration& c = need(calibration, "calibration");
        const crumb_model_identity& m = need(model, "model");
        if (n_layers < 1) fail("an artefact of {} layers: there must be one at least", n_layers);
        const std::span<const int> coded(&need(layers, "layers"), size_t(n_layers));
        require_artefact_output(&need(file, "file"));
        const RotationMethod method;
        Provenance provenance;
        provenance.model = {&need(m.name, "name"), &need(m.architecture, "architecture"), &need(m.hash, "hash"),
                            m.n_layer, m.n_head, m.n_head_kv, m.dim_k, m.dim_v};
        provenance.method = fmt::format("{}; planes, metric {}", describe(method), &need(metric, "metric"));
        provenance.text_hash = c.text.hex();
        provenance.texts = &need(texts, "texts");
        provenance.sketch = c.sketch;
        provenance.tokens = c.tokens;
        std::vector<Metric> metrics;
        for (const Metric& of_fold : c.metrics) {
            if (!of_fold.empty()) metrics.push_back(of_fold);
        }
        Artefact artefact = fit(c.moments, method, std::move(provenance));
        add_planes(artefact, c.moments, coded, metrics, c.n_threads);
        write_artefact(artefact, file);
    });
}

}  // extern "C"
