// The C API of artefacts whose bases were trained elsewhere.
#include <crumb/artefact.h>

#include <algorithm>
#include <span>

#include "capi/layer.h"

namespace crumb::capi {

namespace {

// As many values as `like` has.
void replace(Matrices& like, const float* values, const char* what) {
    std::copy_n(&need(values, what), like.data.size(), like.data.begin());
}

}  // namespace

}  // namespace crumb::capi

using namespace crumb;
using namespace crumb::capi;

extern "C" {

crumb_status crumb_layer_digits(const crumb_layer* layer, int of_values, uint8_t* digits) {
    return guard([&] {
        uint8_t* to = &need(digits, "digits");
        for (const HeadTables& head : need(layer, "layer").tables) {
            const auto& of_head = (of_values ? head.v : head.k).digits;
            if (of_head.empty()) fail("the recipe of this layer gives its directions no digits: that is done by 'planes'");
            to = std::ranges::copy(of_head, to).out;
        }
    });
}

crumb_status crumb_artefact_with_bases(const char* from, const crumb_basis* bases, int n_bases, const char* how,
                                       const int32_t* tokens, int n, int n_tokens, const char* file) {
    return guard([&] {
        if (n_bases < 1 || n < 0 || (n > 0 && n_tokens < 1)) {
            fail("{} bases and {} sequences of {} tokens: give one basis or more, and tokens of one or more a sequence", n_bases, n, n_tokens);
        }
        require_artefact_output(&need(file, "file"));
        Artefact artefact = read_artefact(&need(from, "from"));
        for (const crumb_basis& basis : std::span(&need(bases, "bases"), size_t(n_bases))) {
            artefact.layer(basis.layer);  // says which one is missing
            LayerArtefact& layer = artefact.layers[basis.layer];
            PlanesSide& side = basis.of_values ? layer.v_planes : layer.k_planes;
            if (!side.present()) fail("{}: layer {} has no basis of 'planes'", from, basis.layer);
            replace(side.encode, basis.encode, "encode");
            replace(side.decode, basis.decode, "decode");
            replace(side.step, basis.step, "step");
        }
        artefact.provenance.method += fmt::format("; {}", &need(how, "how"));
        for (int i = 0; i < n; i++) {
            artefact.provenance.sketch.add({&need(tokens, "tokens") + size_t(i) * size_t(n_tokens), size_t(n_tokens)});
        }
        write_artefact(artefact, &need(file, "file"));
    });
}

}  // extern "C"
