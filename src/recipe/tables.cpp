// Static tables of a layer, from the recipe and, for what was learned, the artefact.
//
// Planes are digit-major: the low digits of all directions that have one, then the second digits, then the third;
// padding comes last. With P = D planes the low digits alone are the page of a 2-bit recipe. Codes of 3 bits are a low
// digit and half of a digit that two neighbours share.
#include <crumb/artefact.h>
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>

#include "recipe/planes.h"
#include "recipe/side_format.h"

namespace crumb {

namespace {

// Levels of the best quantiser of a normal variable of variance 1 (Max, 1960), the upper half.
std::span<const float> gaussian_levels(int bits) {
    static constexpr float two[] = {0.4528f, 1.5104f}, three[] = {0.2451f, 0.7560f, 1.3439f, 2.1520f},
                           four[] = {0.1284f, 0.3881f, 0.6568f, 0.9424f, 1.2562f, 1.6181f, 2.0690f, 2.7326f};
    switch (bits) {
        case 2:
            return two;
        case 3:
            return three;
        case 4:
            return four;
    }
    CRUMB_ASSERT(false);
}

// Hadamard after a random sign a channel: bits of a multiplicative congruential sequence, the same for every head.
std::vector<float> signed_hadamard(int dim) {
    std::vector<float> matrix = hadamard(dim);
    uint64_t state = 1;
    for (int i = 0; i < dim; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        for (int j = 0; j < dim && state >> 63 == 1; ++j) {
            matrix[size_t(i) * dim + j] = -matrix[size_t(i) * dim + j];
        }
    }
    return matrix;
}

// Key means that are not there: official files have none.
[[noreturn]] void fail_without_means(const Recipe& recipe, int layer) {
    const auto paper = fmt::format("{}:paper", recipe.name.substr(0, recipe.name.find(':')));
    const bool there = std::ranges::find(recipes(), paper, &Recipe::name) != recipes().end();
    fail(
        "recipe '{}' removes the mean of the keys, and the artefact has none for layer {} (imported rotations have none). "
        "{}make an artefact with: crumb calibrate -m MODEL.gguf -o ARTEFACT.safetensors",
        recipe.name, layer, there ? fmt::format("Take {}, or ", paper) : "");
}

// The matrix of one head, which must be there and fit the model.
std::span<const float> head_of(const Matrices& matrices, const char* what, int layer, int head, int n_head_kv,
                               int dim) {
    if (matrices.dim != dim || (matrices.heads != n_head_kv && matrices.heads != 1)) {
        fail(
            "the artefact has {} {} of size {} for layer {}, the recipe needs {} of size {}. Make a new one with: "
            "crumb calibrate -m MODEL.gguf -o ARTEFACT.safetensors",
            matrices.heads, what, matrices.dim, layer, n_head_kv, dim);
    }
    return matrices.head(head);
}

void assign_planes(SideTables& tables) {
    const int dim = tables.format.dim, planes = tables.format.planes;
    tables.direction.assign(planes, kNoDirection);
    tables.digit.assign(planes, 0);
    int plane = 0;
    for (int digit = 0; digit < 4; ++digit) {
        for (int direction = 0; direction < dim; ++direction) {
            if (digit >= tables.digits[direction]) {
                continue;
            }
            CRUMB_ASSERT(plane < planes);
            tables.direction[plane] = uint16_t(direction);
            tables.digit[plane] = uint8_t(digit);
            ++plane;
        }
    }
}

void share_third_bits(SideTables& tables) {
    const int dim = tables.format.dim;
    for (int direction = 0; direction < dim; direction += 2) {
        const size_t plane = size_t(dim + direction / 2);
        tables.direction[plane] = uint16_t(direction);
        tables.digit[plane] = kSharedDigit;
    }
}

void fill_decode(SideTables& tables, std::span<const double> rows) {
    const size_t dim = size_t(tables.format.dim), planes = size_t(tables.format.planes);
    tables.decode.assign(planes * dim, 0.0f);
    for (size_t p = 0; p < planes; ++p) {
        if (tables.direction[p] == kNoDirection || tables.digit[p] == kSharedDigit) {
            continue;
        }
        const size_t direction = tables.direction[p];
        const double step =
            (tables.step.empty() ? 1.0 : double(tables.step[direction])) * double(1 << (2 * tables.digit[p]));
        for (size_t i = 0; i < dim; ++i) {
            tables.decode[p * dim + i] = float(step * rows[direction * dim + i]);
        }
    }
    if (tables.format.info != SideInfo::scale_zero) {
        return;
    }
    tables.ones.resize(dim);
    for (size_t i = 0; i < dim; ++i) {
        double sum = 0;
        for (size_t direction = 0; direction < dim; ++direction) {
            sum += rows[direction * dim + i];
        }
        tables.ones[i] = float(sum);
    }
}

// Rows of the inverse of an orthonormal map: its transpose.
std::vector<double> transpose(const SideTables& tables) {
    const size_t dim = size_t(tables.format.dim);
    std::vector<double> rows(dim * dim);
    for (size_t i = 0; i < dim; ++i) {
        for (size_t j = 0; j < dim; ++j) {
            rows[j * dim + i] = tables.encode.empty() ? double(i == j) : double(tables.encode[i * dim + j]);
        }
    }
    return rows;
}

SideTables side_tables(const SideRecipe& recipe, const SideFormat& format, std::span<const float> mean,
                       std::span<const float> rotation) {
    const int dim = format.dim;
    SideTables tables;
    tables.format = format;
    if (!format.coded()) {
        return tables;
    }
    tables.mean.assign(mean.begin(), mean.end());
    switch (recipe.map) {
        case Map::identity:
            break;
        case Map::hadamard:
            tables.encode = hadamard(dim);
            break;
        case Map::signed_hadamard:
            tables.encode = signed_hadamard(dim);
            break;
        case Map::rotation:
            tables.encode.assign(rotation.begin(), rotation.end());
            break;
        case Map::planes:
            CRUMB_ASSERT(false);
    }
    tables.digits.assign(dim, uint8_t(recipe.bits / 2));
    if (recipe.quantiser == Quantiser::gain) {
        tables.sigma.assign(dim, 1.0f);
        tables.step.assign(dim, float(kGaussian[recipe.bits / 2].step));
    }
    if (format.lookup) {
        const std::span<const float> upper = gaussian_levels(recipe.bits);
        tables.levels.assign(upper.begin(), upper.end());
        for (const float level : upper) {
            tables.levels.insert(tables.levels.begin(), -level);
        }
    }
    CRUMB_ASSERT(!format.mean);  // no artefact carries the static steps of page means
    finish_tables(tables, transpose(tables));
    return tables;
}

[[noreturn]] void fail_without_artefact(const Recipe& recipe) {
    std::string others;
    for (const Recipe& other : recipes()) {
        if (other.coded() && !other.needs_artefact() && !other.slow()) {
            others.append(others.empty() ? "" : ", ").append(other.name);
        }
    }
    fail(
        "KV recipe '{}' needs a calibration artefact, and none was given. Make one with crumb_kv.calibrate() or crumb "
        "calibrate -m MODEL.gguf and give its file (in Python: artefact=FILE); or take a recipe that needs none: {}",
        recipe.name, others);
}

// The basis of a side, which must be there and fit the model.
const PlanesSide& fitting(const PlanesSide& side, const char* what, const CodedLayer& layer, int dim) {
    if (!side.present()) {
        fail(
            "the artefact has no {} basis of 'planes' for layer {}: it was made by another program, or by crumb before "
            "'planes'. Make a new one with: crumb calibrate -m MODEL.gguf -o ARTEFACT.safetensors",
            what, layer.layer);
    }
    head_of(side.encode, what, layer.layer, 0, layer.n_head_kv, dim);
    return side;
}

}  // namespace

void finish_tables(SideTables& tables, std::span<const double> inverse) {
    assign_planes(tables);
    if (tables.levels.size() == 8) {
        share_third_bits(tables);
    }
    fill_decode(tables, inverse);
}

std::vector<PageFormat> page_formats(const Recipe& recipe, std::span<const CodedLayer> layers,
                                     const Artefact* artefact) {
    std::vector<PageFormat> formats;
    if (!recipe.budgeted()) {
        for (const CodedLayer& layer : layers) {
            formats.push_back(page_format(recipe, layer.dim_k, layer.dim_v));
        }
        return formats;
    }
    if (!artefact) {
        fail_without_artefact(recipe);
    }
    std::vector<PlanesLayer> bases;
    for (const CodedLayer& layer : layers) {
        const LayerArtefact& learned = artefact->layer(layer.layer);
        bases.push_back({layer.n_head_kv, &fitting(learned.k_planes, "key", layer, layer.dim_k),
                         &fitting(learned.v_planes, "value", layer, layer.dim_v)});
    }
    formats = planes_formats(bases, recipe);
    // The other side of an ablation: what is left has the planes that it has beside it.
    for (size_t i = 0; i < layers.size(); ++i) {
        if (recipe.k.map != Map::planes) {
            formats[i].k = side_format(recipe.k, layers[i].dim_k);
        }
        if (recipe.v.map != Map::planes) {
            formats[i].v = side_format(recipe.v, layers[i].dim_v);
        }
        check(formats[i]);
    }
    return formats;
}

std::vector<HeadTables> layer_tables(const Recipe& recipe, int layer, int n_head_kv, const PageFormat& format,
                                     const Artefact* artefact) {
    if (recipe.needs_artefact() && !artefact) {
        fail_without_artefact(recipe);
    }
    const LayerArtefact none, &learned = recipe.needs_artefact() ? artefact->layer(layer) : none;
    const int dim_k = format.k.dim, dim_v = format.v.dim;
    const CodedLayer shape = {layer, n_head_kv, dim_k, dim_v};
    std::vector<HeadTables> heads(n_head_kv);
    for (int head = 0; head < n_head_kv; ++head) {
        std::span<const float> k_mean, k_rotation, v_rotation;
        if (recipe.k.centre == Centre::key_mean) {
            if (!learned.k_mean.present()) {
                fail_without_means(recipe, layer);
            }
            k_mean = head_of(learned.k_mean, "key means", layer, head, n_head_kv, dim_k);
        }
        if (recipe.k.map == Map::rotation) {
            k_rotation = head_of(learned.k_rotation, "key rotations", layer, head, n_head_kv, dim_k);
        }
        if (recipe.v.map == Map::rotation) {
            v_rotation = head_of(learned.v_rotation, "value rotations", layer, head, n_head_kv, dim_v);
        }
        heads[head].k = recipe.k.map == Map::planes
                            ? planes_tables(fitting(learned.k_planes, "key", shape, dim_k), head, format.k)
                            : side_tables(recipe.k, format.k, k_mean, k_rotation);
        heads[head].v = recipe.v.map == Map::planes
                            ? planes_tables(fitting(learned.v_planes, "value", shape, dim_v), head, format.v)
                            : side_tables(recipe.v, format.v, {}, v_rotation);
    }
    return heads;
}

}  // namespace crumb
