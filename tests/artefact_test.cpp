// The artefact file: round trip, every way to be damaged, and the refusal of another model.
#include <crumb/artefact.h>
#include <crumb/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "calibrate/artefact_file.h"
#include "calibrate/fingerprint.h"
#include "base/whole_file.h"
#include "files.h"

namespace crumb {
namespace {

namespace fs = std::filesystem;

// Block-diagonal plane rotations, not symmetric: a transposed matrix is another one.
void append_rotation(Matrices& m, int d, double angle) {
    m.dim = d;
    ++m.heads;
    const size_t base = m.data.size();
    m.data.resize(base + size_t(d) * d);
    for (int i = 0; i < d; i += 2) {
        float* row = &m.data[base + size_t(i) * d + i];
        row[0] = row[d + 1] = float(std::cos(angle + i));
        row[1] = float(std::sin(angle + i));
        row[d] = -row[1];
    }
}

// A triangular basis of 2 heads and its inverse.
PlanesSide planes_side(int d) {
    PlanesSide side;
    for (Matrices* m : {&side.encode, &side.decode}) {
        *m = {2, d, std::vector<float>(2 * size_t(d) * d)};
        for (int i = 0; i < 2 * d; ++i) {
            m->data[size_t(i) * d + i % d] = 1;
            if (i % d > 0) {
                m->data[size_t(i) * d] = m == &side.encode ? 0.5f : -0.5f;
            }
        }
    }
    side.spectrum = {2, d, std::vector<float>(2 * size_t(d), 0.75f)};
    side.step = {2, d, std::vector<float>(6 * size_t(d), 0.25f)};
    side.page_step = {2, d, std::vector<float>(2 * size_t(d), 0.125f)};
    return side;
}

Artefact example() {
    Artefact a;
    a.provenance = {.model = {"Tiny \"1\" \xc3\xa9", "llama", "00112233445566778899aabbccddeeff", 3, 4, 2, 8, 6},
                    .method = "K qqt and V sst, r_h_pbr, per layer",
                    .text_hash = "ffeeddccbbaa99887766554433221100",
                    .texts = "a.txt, b.txt",
                    .sketch = TextSketch::parse("00000000000000408000000000000000"),
                    .tokens = 32768,
                    .created_by = "crumb 0.1.0"};
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const int index : {0, 2, 11}) {
        LayerArtefact& layer = a.layers[index];
        layer.k_mean = {2, 8, std::vector<float>(16)};
        for (float& x : layer.k_mean.data) {
            x = normal(random);
        }
        append_rotation(layer.k_rotation, 8, 0.1 + index);
        append_rotation(layer.v_rotation, 6, 0.2 + index);
        if (index == 2) {
            append_rotation(layer.v_rotation, 6, 0.3);
        }
    }
    a.layers[5].v_rotation = a.layers[0].v_rotation;  // the other tensors are absent
    a.layers[2].k_planes = planes_side(8);
    a.layers[2].k_planes.mean = a.layers[2].k_mean;
    a.layers[2].v_planes = planes_side(6);
    a.layers[2].v_planes.page_step = {};
    return a;
}

using ArtefactFile = FolderTest;

TEST_F(ArtefactFile, ReadsWhatItWrote) {
    const Artefact a = example();
    const fs::path file = folder_ / "a.safetensors";
    write_artefact(a, file);
    EXPECT_EQ(read_artefact(file), a);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);  // no temporary file remains

    const auto bytes = read_whole_file(file, "an artefact", 1 << 20);
    Fingerprint fingerprint;
    fingerprint.add(bytes);
    EXPECT_EQ(a.hash(), fingerprint.hex());
    EXPECT_EQ(bytes, serialise(read_artefact(file)));
}

TEST_F(ArtefactFile, SaysWhyItCannotBeReadOrWritten) {
    EXPECT_TRUE(contains(error_of([&] { read_artefact(folder_ / "none"); }), "there is no such file"));
    EXPECT_TRUE(contains(error_of([&] { read_artefact(folder_); }), "not a file"));
    EXPECT_TRUE(
        contains(error_of([&] { write_artefact(example(), folder_ / "none" / "a"); }), "No such file or directory"));
    EXPECT_TRUE(contains(error_of([&] { write_artefact(example(), folder_); }), "is a folder"));
    EXPECT_TRUE(contains(error_of([&] { write_artefact({}, folder_ / "a"); }), "no layers"));
    EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(ArtefactFile, KeepsTheOldFileWhenWritingFails) {
    const fs::path file = folder_ / "a.safetensors";
    write_artefact(example(), file);
    Artefact bad = example();
    bad.layers[0].k_mean.data[3] = INFINITY;
    EXPECT_TRUE(contains(error_of([&] { write_artefact(bad, file); }), "layer 0: k_mean has the value inf at index 3"));
    EXPECT_EQ(read_artefact(file), example());
}

TEST(Artefact, HashIsThatOfTheContent) {
    const std::string hash = example().hash();
    EXPECT_EQ(hash.size(), 32u);
    EXPECT_EQ(example().hash(), hash);
    Artefact other = example();
    other.layers[0].k_mean.data[0] += 1;
    EXPECT_NE(other.hash(), hash);
    other = example();
    other.provenance.tokens++;
    EXPECT_NE(other.hash(), hash);
}

TEST(Artefact, RefusesAnotherModelAndSaysWhatDiffers) {
    const Artefact a = example();
    ModelIdentity model = a.provenance.model;
    model.name = "renamed";
    a.require(model);

    model = a.provenance.model;
    model.hash = "0123";
    EXPECT_TRUE(contains(error_of([&] { a.require(model); }), "another quantisation or fine-tune of one model"));
    model.name = "other";
    EXPECT_TRUE(contains(error_of([&] { a.require(model); }), "same shape and different weights"));
    model.n_layer = 28;
    model.n_head_kv = 4;
    const std::string text = error_of([&] { a.require(model); });
    EXPECT_TRUE(contains(text, "They differ in: layers (3 and 28), KV heads (2 and 4)."));
    EXPECT_TRUE(
        contains(text, "'other' (llama, 28 layers, 4 query and 4 KV heads, K 8 and V 6 channels, weights 0123)"));
    EXPECT_TRUE(contains(text, "crumb calibrate -m MODEL -o FILE"));
    Artefact unknown;
    EXPECT_NE(error_of([&] { unknown.require({}); }), "no error");
}

TEST(Artefact, IsAdoptedByAnotherQuantisationAlone) {
    const Artefact a = example();
    EXPECT_EQ(a.adopted_by(a.provenance.model), a);
    ModelIdentity other = a.provenance.model;
    other.hash = "f32";
    other.name = "the same in F32";
    const Artefact b = a.adopted_by(other);
    b.require(other);
    EXPECT_EQ(b.layers, a.layers);
    EXPECT_TRUE(contains(b.provenance.method, "measured with the weights " + a.provenance.model.hash)) << b.provenance.method;
    EXPECT_NE(b.hash(), a.hash());
    other.n_head_kv += 1;
    EXPECT_TRUE(contains(error_of([&] { a.adopted_by(other); }), "a model of another shape"));
}

TEST(Artefact, OfTransformersIsAdoptedByAGgufOfTheSameArchitecture) {
    Artefact a = example();
    const ModelIdentity gguf = a.provenance.model;
    a.provenance.model.architecture = "transformers/llama";
    a.provenance.model.hash = "of safetensors";
    EXPECT_TRUE(contains(error_of([&] { a.require(gguf); }), "crumb rotations adopt -m MODEL"));
    const Artefact b = a.adopted_by(gguf);
    b.require(gguf);
    EXPECT_EQ(b.provenance.model, gguf);
    for (const char* other : {"transformers/granite", "only in transformers/llama", "transformers/"}) {
        a.provenance.model.architecture = other;
        EXPECT_TRUE(contains(error_of([&] { a.adopted_by(gguf); }), "a model of another shape"));
    }
}

TEST(Artefact, NamesALayerThatItLacks) {
    const Artefact a = example();
    EXPECT_EQ(&a.layer(2), &a.layers.at(2));
    EXPECT_TRUE(contains(error_of([&] { a.layer(1); }), "nothing for layer 1, only for layers 0 2 5 11"));
}

TEST(Artefact, OneMatrixServesAllHeads) {
    const Artefact a = example();
    EXPECT_EQ(a.layer(0).v_rotation.head(0).data(), a.layer(0).v_rotation.head(1).data());
    EXPECT_EQ(a.layer(2).v_rotation.head(0).data() + 36, a.layer(2).v_rotation.head(1).data());
}

TEST(Artefact, RefusesContradictions) {
    const auto refused = [](const auto& change) {
        Artefact a = example();
        change(a);
        return error_of([&] { check(a, "x"); });
    };
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_rotation.data[0] += 0.01f; }),
                         "layer 2: k_rotation of head 0 is not orthogonal"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].v_rotation.data[40] = NAN; }),
                         "layer 2: v_rotation has the value nan"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].v_rotation.data.pop_back(); }), "has 71 values"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { append_rotation(a.layers[2].v_rotation, 6, 0); }),
                         "k_mean has 2 heads, k_rotation 1 and v_rotation 3"));
    EXPECT_TRUE(contains(refused([](Artefact& a) {
                             a.layers[2].k_mean = {2, 6, std::vector<float>(12)};
                         }),
                         "k_mean has 6 channels and k_rotation 8"));

    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_planes.decode.data[65] += 0.01f; }),
                         "k_planes.decode of head 1 is not the inverse of encode"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].v_planes.step.data[3] = 0; }),
                         "v_planes.step has the step 0 at index 3"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_planes.page_step.data[0] = -1; }), "k_planes.page_step"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_planes.spectrum.data[0] = -1; }), "negative variance"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_planes.step.data.pop_back(); }),
                         "k_planes.step has 47 values"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_planes.spectrum = {}; }), "does not go without"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].v_planes = {}; }), "they belong together"));
    EXPECT_TRUE(contains(refused([](Artefact& a) { a.layers[2].k_planes.mean.dim = 4; }), "k_planes.mean"));
}

// A file with this header and `data` bytes of zeros.
std::vector<std::byte> file_of(const std::string& header, size_t data = 0, uint64_t length = UINT64_MAX) {
    if (length == UINT64_MAX) {
        length = header.size();
    }
    std::vector<std::byte> bytes(8 + header.size() + data);
    std::memcpy(bytes.data(), &length, 8);
    std::memcpy(bytes.data() + 8, header.data(), header.size());
    return bytes;
}

const std::string kMetadata =
    R"("__metadata__":{"format":"crumb-artefact","format_version":"1","model.name":"","model.architecture":"","model.hash":"",)"
    R"("model.n_layer":"1","model.n_head":"1","model.n_head_kv":"1","model.dim_k":"2","model.dim_v":"2","method":"","text_hash":"",)"
    R"("texts":"","tokens":"1","created_by":""})";

std::string parse_error(const std::string& header, size_t data = 0, uint64_t length = UINT64_MAX) {
    return error_of([&] { parse_artefact(file_of(header, data, length), "x"); });
}

TEST(ArtefactHeader, HostileSizes) {
    EXPECT_TRUE(contains(parse_error("{}", 0, 1ull << 63), "header of 9223372036854775808 bytes"));
    EXPECT_TRUE(contains(parse_error("{}", 0, 3), "header of 3 bytes"));
    EXPECT_TRUE(contains(parse_error(std::string((1 << 20) + 1, ' ')), "at most 1048576"));
    EXPECT_TRUE(contains(parse_error(std::string(100000, '[')), "nested deeper"));
    EXPECT_TRUE(contains(parse_error(std::string(100000, '{')), "not JSON"));
}

TEST(ArtefactHeader, MetadataIsNeeded) {
    EXPECT_TRUE(contains(parse_error("[1]"), "not a JSON object"));
    EXPECT_TRUE(contains(parse_error("{}"), "no metadata"));
    EXPECT_TRUE(contains(parse_error(R"({"__metadata__":{"format":"pt"}})"), "its format is 'pt'"));
    EXPECT_TRUE(contains(parse_error(R"({"__metadata__":{"format":"crumb-artefact","format_version":"2"}})"),
                         "format version 2"));
    EXPECT_TRUE(contains(parse_error(R"({"__metadata__":{"format":"crumb-artefact","format_version":"1"}})"),
                         "lacks 'model.name'"));
    std::string bad = "{" + kMetadata + "}";
    bad.replace(bad.find(R"("tokens":"1")"), 12, R"("tokens":"-1")");
    EXPECT_TRUE(contains(parse_error(bad), "gives tokens as '-1'"));
    EXPECT_TRUE(contains(parse_error("{" + kMetadata + "," + kMetadata + "}"), "names '__metadata__' twice"));
}

TEST(ArtefactHeader, TensorsAreChecked) {
    const auto tensor = [](const std::string& name, const std::string& entry, size_t data) {
        return parse_error("{" + kMetadata + ",\"" + name + "\":" + entry + "}", data);
    };
    const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return fmt::format(R"({{"dtype":"{}","shape":{},"data_offsets":{}}})", dtype, shape, offsets);
    };
    EXPECT_EQ(tensor("layers.0.k_mean", entry("F32", "[1,2]", "[0,8]"), 8), "no error");
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F16", "[1,2]", "[0,4]"), 4), "not F32 (dtype \"F16\")"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", "7", 8), "not F32"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[2]", "[0,8]"), 8), "has the shape [2]"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[0,2]", "[0,0]"), 0), "has the shape [0,2]"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[1,-2]", "[0,8]"), 8), "has the shape [1,-2]"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[1,2.0]", "[0,8]"), 8), "has the shape [1,2.0]"));
    EXPECT_TRUE(
        contains(tensor("layers.0.k_mean", entry("F32", "[4294967296,4294967296]", "[0,0]"), 0), "has the shape"));
    EXPECT_TRUE(
        contains(tensor("layers.0.k_rotation", entry("F32", "[1,2,3]", "[0,24]"), 24), "expected [heads, D, D]"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[1,2]", "[8,0]"), 8), "needs 8 bytes"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[1,2]", "[4,12]"), 12), "expected to begin at 0"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[1,2]", "[0,8]"), 4), "to end within 4"));
    EXPECT_TRUE(contains(tensor("layers.0.k_mean", entry("F32", "[1,2]", "[0,8]"), 12),
                         "12 bytes of data, but its tensors have 8"));
    for (const char* name : {"k_mean", "layers.0.q_mean", "layers.00.k_mean", "layers.-1.k_mean", "layers.x.k_mean",
                             "layers.99999999999.k_mean", "layers.10000.k_mean", "layers.0", "layers."}) {
        EXPECT_TRUE(contains(tensor(name, entry("F32", "[1,2]", "[0,8]"), 8), "does not know")) << name;
    }
    const std::string mean = entry("F32", "[1,2]", "[0,8]");
    EXPECT_TRUE(contains(
        parse_error("{" + kMetadata + ",\"layers.0.k_mean\":" + mean + ",\"layers.1.k_mean\":" + mean + "}", 8),
        "expected to begin at 8"));
    EXPECT_TRUE(contains(
        parse_error("{" + kMetadata + ",\"layers.0.k_mean\":" + mean + ",\"layers.0.k_mean\":" + mean + "}", 8),
        "names 'layers.0.k_mean' twice"));
}

TEST(ArtefactDamage, TruncatedAtEveryLength) {
    const auto bytes = serialise(example());
    for (size_t n = 0; n < bytes.size(); ++n) {
        EXPECT_THROW(parse_artefact(std::span(bytes).first(n), "x"), Error) << n;
    }
}

// Files of an older crumb have no checksum: they are read, and what is written from them has their hash.
TEST(ArtefactDamage, AFileWithoutChecksum) {
    Artefact old = example();
    old.checked = Artefact::Checked::nothing;
    const auto bytes = serialise(old);
    EXPECT_TRUE(std::ranges::search(bytes, std::as_bytes(std::span("checksum", 8))).empty());
    EXPECT_EQ(parse_artefact(bytes, "x"), old);
    EXPECT_EQ(serialise(parse_artefact(bytes, "x")), bytes);
    EXPECT_NE(old.hash(), example().hash());

    old.checked = Artefact::Checked::tensors;
    const auto later = serialise(old);
    EXPECT_TRUE(std::ranges::search(later, std::as_bytes(std::span("metadata_checksum", 17))).empty());
    EXPECT_EQ(parse_artefact(later, "x"), old);
    EXPECT_EQ(serialise(parse_artefact(later, "x")), later);
}

// A name that is no UTF-8 is written with replacements, and the checksum is of those.
TEST(ArtefactDamage, NamesThatAreNoTexts) {
    Artefact artefact = example();
    artefact.provenance.texts = "a\xff.txt";
    EXPECT_EQ(parse_artefact(serialise(artefact), "x").provenance.texts, "a\ufffd.txt");
}

// A changed bit is refused, but where it takes the name of the last checksum: then all that the file says is as it was.
TEST(ArtefactDamage, FlippedBits) {
    const auto bytes = serialise(example());
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    for (size_t i = sizeof(header) + header; i < bytes.size(); ++i) {
        auto flipped = bytes;
        flipped[i] ^= std::byte(1 << i % 8);
        EXPECT_TRUE(contains(error_of([&] { parse_artefact(flipped, "x"); }), "x: not a usable artefact: it is damaged")) << i;
    }
    for (size_t i = 0; i < sizeof(header) + header; ++i) {
        for (const int bit : {0, 2, 6}) {
            auto flipped = bytes;
            flipped[i] ^= std::byte(1 << bit);
            try {
                Artefact read = parse_artefact(flipped, "x");
                EXPECT_EQ(read.checked, Artefact::Checked::tensors) << i;
                read.checked = Artefact::Checked::all;
                EXPECT_EQ(read, example()) << i;
            } catch (const Error&) {
            }
        }
    }
}

}  // namespace
}  // namespace crumb
