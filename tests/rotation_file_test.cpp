// OSCAR's rotation files: those that PyTorch wrote (tests/data/rotation_files.py), round trips, and pickles that ask
// for more than tensors.
#include "calibrate/rotation_file.h"

#include <crumb/error.h>
#include <crumb/rotation_file.h>
#include <gtest/gtest.h>
#include <zip.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "calibrate/pickle.h"
#include "base/whole_file.h"
#include "files.h"

namespace crumb {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

const fs::path kData = fs::path(CRUMB_SOURCE) / "tests" / "data";

// Matrix n of the fixtures: the 4 x 4 Hadamard matrix with its rows moved down by n.
void append_matrix(std::vector<float>& data, int n) {
    constexpr float h[4][4] = {{1, 1, 1, 1}, {1, -1, 1, -1}, {1, 1, -1, -1}, {1, -1, -1, 1}};
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
            data.push_back(h[(i - n + 4) % 4][j] / 2);
        }
    }
}

Matrices matrices(const std::vector<int>& numbers) {
    Matrices m{.heads = int(numbers.size()), .dim = 4, .data = {}};
    for (const int n : numbers) {
        append_matrix(m.data, n);
    }
    return m;
}

const ModelIdentity kModel{"Tiny", "llama", "0123", 8, 4, 2, 4, 4};

RotationFile read(const char* name) {
    return parse_rotation_file(read_whole_file(kData / name, "a test file", 1 << 20), name);
}

TEST(RotationFile, V1OfPyTorch) {
    const RotationFile file = read("rotations_v1.pt");
    EXPECT_EQ(file.objective, "qqt_r_h_pbr");
    ASSERT_EQ(file.layers.size(), 2u);
    EXPECT_EQ(file.layers.at(3).rotation, matrices({1}));
    EXPECT_EQ(file.layers.at(7).rotation, matrices({2}));  // stored column by column
    EXPECT_FALSE(file.layers.at(3).k_mean.present());
}

TEST(RotationFile, SharedStorageAndTextKeysOfPyTorch) {
    const RotationFile file = read("rotations_shared.pt");
    EXPECT_EQ(file.objective, "");
    EXPECT_EQ(file.layers.at(3).rotation, matrices({2}));
    EXPECT_EQ(file.layers.at(7).rotation, matrices({1}));
}

TEST(RotationFile, V2OfPyTorch) {
    const RotationFile file = read("rotations_v2.pt");
    EXPECT_EQ(file.layers.at(3).rotation, matrices({1, 2}));  // F64
    EXPECT_EQ(file.layers.at(7).rotation, matrices({3, 0}));  // BF16
    EXPECT_EQ(file.layers.at(3).k_mean.data, (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(file.layers.at(7).k_mean.data, (std::vector<float>{0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5}));  // F16
}

TEST(RotationFile, ImportIsAnArtefactOfTheModel) {
    const Artefact a = import_rotation_files(kData / "rotations_v2.pt", kData / "rotations_shared.pt", kModel);
    EXPECT_EQ(a.provenance.model, kModel);
    EXPECT_EQ(a.provenance.method,
              "imported from rotations_v2.pt (cov_eig_hadamard_perhead) and rotations_shared.pt ()");
    EXPECT_EQ(a.layer(3).k_rotation, matrices({1, 2}));
    EXPECT_EQ(a.layer(3).v_rotation, matrices({2}));
    EXPECT_EQ(a.layer(7).k_mean.head(1)[3], 3.5f);
    check(a, "x");

    ModelIdentity shallow = kModel;
    shallow.n_layer = 7;
    EXPECT_TRUE(contains(
        error_of([&] { import_rotation_files(kData / "rotations_v1.pt", kData / "rotations_shared.pt", shallow); }),
        "has a layer 7, but 'Tiny' has 7 layers"));
    EXPECT_TRUE(contains(
        error_of([&] { import_rotation_files(kData / "rotations_shared.pt", kData / "rotations_v1.pt", kModel); }),
        "exchange the files"));
    EXPECT_TRUE(contains(error_of([&] { import_rotation_files(kData / "none.pt", kData / "rotations_v1.pt", kModel); }),
                         "there is no such file"));
}

using RotationFiles = FolderTest;

TEST_F(RotationFiles, ExportAndImportAgain) {
    for (const bool per_head : {false, true}) {
        Artefact a;
        a.provenance.model = kModel;
        a.provenance.method = "K qqt and V sst";
        for (const int index : {0, 3}) {
            a.layers[index].k_rotation = per_head ? matrices({index, 1}) : matrices({index});
            a.layers[index].v_rotation = per_head ? matrices({2, 3}) : matrices({2});
            a.layers[index].k_mean = {2, 4, {1, 2, 3, 4, 5, 6, 7, float(index)}};
        }
        export_rotation_files(a, folder_ / "k.pt", folder_ / "v.pt");
        Artefact back = import_rotation_files(folder_ / "k.pt", folder_ / "v.pt", kModel);
        EXPECT_EQ(back.provenance.method, "imported from k.pt (K qqt and V sst) and v.pt (K qqt and V sst)");
        back.provenance = a.provenance;
        if (!per_head) {
            for (auto& [index, layer] : a.layers) {
                layer.k_mean = {};
            }  // V1 has no place for it
        }
        EXPECT_EQ(back, a);
        const Bytes once = read_whole_file(folder_ / "k.pt", "", 1 << 20);
        export_rotation_files(a, folder_ / "k.pt", folder_ / "v.pt");
        EXPECT_EQ(read_whole_file(folder_ / "k.pt", "", 1 << 20), once);
    }
    Artefact half;
    half.layers[1].k_rotation = matrices({0});
    EXPECT_TRUE(contains(error_of([&] { export_rotation_files(half, folder_ / "k.pt", folder_ / "v.pt"); }),
                         "layer 1 of the artefact has no rotation of V"));
}

// A PyTorch archive by hand.
struct Entry {
    std::string name;
    std::string data;
    bool deflated = false;
};

Bytes archive(const std::vector<Entry>& entries) {
    zip_error_t error;
    zip_error_init(&error);
    zip_source_t* target = zip_source_buffer_create(nullptr, 0, 0, &error);
    zip_source_keep(target);
    zip_t* zip = zip_open_from_source(target, ZIP_TRUNCATE, &error);
    for (const Entry& entry : entries) {
        zip_source_t* source = zip_source_buffer(zip, entry.data.data(), entry.data.size(), 0);
        const auto index = zip_file_add(zip, entry.name.c_str(), source, 0);
        zip_set_file_compression(zip, zip_uint64_t(index), entry.deflated ? ZIP_CM_DEFLATE : ZIP_CM_STORE, 0);
    }
    zip_close(zip);
    zip_stat_t stat;
    zip_source_stat(target, &stat);
    Bytes bytes(stat.size);
    zip_source_open(target);
    zip_source_read(target, bytes.data(), bytes.size());
    zip_source_close(target);
    zip_source_free(target);
    return bytes;
}

// Pickle protocol 4 as Python writes it, put together by hand.
std::string text(const std::string& s) { return "\x8c" + std::string(1, char(s.size())) + s; }
std::string number(int n) { return "K" + std::string(1, char(n)); }
std::string global(const std::string& module, const std::string& name) {
    return text(module) + "\x94" + text(name) + "\x93";
}
std::string pickled(const std::string& body) {
    return std::string("\x80\x04\x95", 3) + std::string(8, '\0') + body + ".";
}
std::string storage(const std::string& key, int elements, const std::string& type = "FloatStorage") {
    return "(" + text("storage") + global("torch", type) + text(key) + text("cpu") + number(elements) + "tQ";
}
std::string tensor(const std::string& storage, int offset, const std::string& shape, const std::string& stride) {
    return global("torch._utils", "_rebuild_tensor_v2") + "(" + storage + number(offset) + shape + stride + "\x89" +
           global("collections", "OrderedDict") + ")RtR";
}
std::string square(int n) { return number(n) + number(n) + "\x86"; }
std::string pair(int a, int b) { return number(a) + number(b) + "\x86"; }
std::string identity_elements(int d) {
    std::string data;
    for (int i = 0; i < d * d; ++i) {
        const float x = i % (d + 1) == 0;
        data.append(reinterpret_cast<const char*>(&x), sizeof(x));
    }
    return data;
}

std::string parse_error(const std::string& pickle, std::vector<Entry> more = {}) {
    more.push_back({"a/data.pkl", pickle});
    more.push_back({"a/data/0", identity_elements(2)});
    return error_of([&] { parse_rotation_file(archive(more), "x.pt"); });
}

const std::string kRotation = text("rotation") + tensor(storage("0", 4), 0, square(2), pair(2, 1));

TEST(RotationFileByHand, NewerProtocolsAndEntriesAreRead) {
    // s: SETITEM, so the dictionary of a layer is closed by u, the others by s
    const Bytes bytes =
        archive({{"a/data.pkl", pickled("}" + text("layers") + "}" + number(6) + "}(" + kRotation + "uss")},
                 {"a/.format_version", "1"},
                 {"a/.storage_alignment", "64"},
                 {"a/byteorder", "little"},
                 {"a/data/0", identity_elements(2)},
                 {"a/version", "3\n"},
                 {"a/.data/serialization_id", "0123"}});
    const RotationFile file = parse_rotation_file(bytes, "x.pt");
    EXPECT_EQ(file.layers.at(6).rotation, (Matrices{1, 2, {1, 0, 0, 1}}));
}

TEST(RotationFileByHand, CodeIsRefused) {
    const auto calls = [](const std::string& module, const std::string& name) {
        return parse_error(pickled(global(module, name) + text("echo") + "\x85R"));
    };
    EXPECT_TRUE(contains(calls("os", "system"), "it asks for os.system, which is not a plain tensor's"));
    EXPECT_TRUE(contains(calls("torch", "load"), "it asks for torch.load"));
    EXPECT_TRUE(contains(calls("torch", "FloatStorage"), "it calls torch FloatStorage with 1 arguments"));
    EXPECT_TRUE(contains(calls("collections", "OrderedDict"), "it calls collections OrderedDict with 1 arguments"));
    EXPECT_TRUE(contains(parse_error("\x80\x02"
                                     "cos\nsystem\n."),
                         "it asks for os.system"));
    EXPECT_TRUE(contains(parse_error("\x80\x02"
                                     "(S'x'\nios\nsystem\n."),
                         "opcode 0x53"));
    EXPECT_TRUE(contains(parse_error("\x80\x02}}b."), "opcode 0x62"));       // BUILD
    EXPECT_TRUE(contains(parse_error("\x80\x02)\x81."), "opcode 0x81"));     // NEWOBJ
    EXPECT_TRUE(contains(parse_error("\x80\x02\x82\x01."), "opcode 0x82"));  // EXT1
}

TEST(RotationFileByHand, BrokenPicklesAreRefused) {
    EXPECT_TRUE(contains(parse_error(""), "it ends where 1 more bytes should follow"));
    EXPECT_TRUE(contains(parse_error("\x80\x01}."), "protocol 1"));
    EXPECT_TRUE(contains(parse_error("."), "takes a value where there is none"));
    EXPECT_TRUE(contains(parse_error("}}."), "values are left over"));
    EXPECT_TRUE(contains(parse_error("t."), "a mark is missing"));
    EXPECT_TRUE(contains(parse_error("(}u."), "takes a value where there is none"));
    EXPECT_TRUE(contains(parse_error("}(}u."), "a key that has no value"));
    EXPECT_TRUE(contains(parse_error("NNs."), "takes a value where there is none"));
    EXPECT_TRUE(contains(parse_error("NNNs."), "nothing where a dictionary is expected"));
    EXPECT_TRUE(contains(parse_error("h\x07."), "it recalls value 7"));
    EXPECT_TRUE(contains(parse_error("X\xff\xff\xff\xff."), "4294967295 more bytes"));
    EXPECT_TRUE(contains(parse_error(std::string("\x8a\x09") + std::string(9, '\1') + "."), "a number of 9 bytes"));
    EXPECT_TRUE(contains(parse_error(std::string((1 << 20) + 1, 'N')), "more than 1048576"));
    EXPECT_TRUE(contains(parse_error("](h"), "more bytes"));
    EXPECT_TRUE(
        contains(parse_error("]q\1h\1a."), "a list where a dictionary is expected"));  // a list that holds itself
    EXPECT_TRUE(contains(parse_error("K\1Q."), "a number where a storage's description"));
    EXPECT_TRUE(contains(parse_error(storage(std::string(65, 'k'), 4) + "."), "a storage whose name has 65 bytes"));
    EXPECT_TRUE(contains(parse_error(storage("0", 4, "LongStorage") + "."), "it asks for torch.LongStorage"));
}

TEST(RotationFileByHand, WrongContentsAreRefused) {
    const auto layer = [](const std::string& content) {
        return parse_error(pickled("}" + text("layers") + "}" + number(0) + "}(" + content + "uss"));
    };
    const auto rotation = [&](const std::string& value) { return layer(text("rotation") + value); };
    EXPECT_EQ(layer(kRotation), "no error");
    EXPECT_TRUE(contains(parse_error(pickled(number(1))), "the file is a number where a dictionary is expected"));
    EXPECT_TRUE(contains(parse_error(pickled("}")), "has no 'layers'"));
    EXPECT_TRUE(contains(parse_error(pickled("}" + text("layers") + "}s")), "has no layers"));
    EXPECT_TRUE(contains(parse_error(pickled("}" + text("layers") + "]s")), "'layers' is a list"));
    EXPECT_TRUE(contains(parse_error(pickled("}" + text("layers") + "}" + text("one") + "}ss")), "named by a text"));
    EXPECT_TRUE(contains(parse_error(pickled("}" + text("layers") + "}(" + number(1) + "}(" + kRotation + "u" +
                                             text("1") + "}(" + kRotation + "uus")),
                         "layer 1 occurs twice"));
    EXPECT_TRUE(contains(layer(""), "layer 0 has no 'rotation'"));
    EXPECT_TRUE(contains(rotation("N"), "layer 0 has no 'rotation'"));
    EXPECT_TRUE(contains(rotation("]"), "rotation is a list where a tensor is expected"));
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 0, pair(1, 4), pair(4, 1))), "has the shape [1, 4]"));
    EXPECT_TRUE(
        contains(rotation(tensor(storage("0", 4), 0, number(4) + "\x85", number(1) + "\x85")), "has the shape [4]"));
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 1, square(2), pair(2, 1))),
                         "does not fit its storage 0 of 4 elements"));
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 0, square(2), pair(3, 1))), "does not fit"));
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 0, square(4), pair(0, 0))), "does not fit"));
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 5), 0, square(2), pair(2, 1))), "(16 bytes in the file)"));
    EXPECT_TRUE(contains(rotation(tensor(storage("1", 4), 0, square(2), pair(2, 1))), "entry a/data/1 is missing"));
    EXPECT_TRUE(
        contains(rotation(tensor(storage("0", 4), 0, square(2), number(1) + "\x85")), "fewer strides than sizes"));
    const std::string huge = "\x8a\x08" + std::string(7, '\xff') + "\x7f";
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 0, square(2), huge + huge + "\x86")), "does not fit"));
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 0, "K\2" + huge + "\x86", pair(2, 1))), "has the shape"));
    const std::string minus = "J\xff\xff\xff\xff";
    EXPECT_TRUE(contains(rotation(tensor(storage("0", 4), 0, square(2), number(2) + minus + "\x86")), "negative"));
    for (const char* transform : {"q_rotation", "o_rotation"}) {
        EXPECT_TRUE(contains(layer(kRotation + text(transform) + tensor(storage("0", 4), 0, square(2), pair(2, 1))),
                             "its transform is not orthogonal"));
        EXPECT_EQ(layer(kRotation + text(transform) + "N"), "no error");
    }
}

TEST(RotationFileByHand, OtherArchivesAreRefused) {
    const auto parse = [](const std::vector<Entry>& entries) {
        return error_of([&] { parse_rotation_file(archive(entries), "x.pt"); });
    };
    const std::string good = pickled("}" + text("layers") + "}" + number(0) + "}(" + kRotation + "uss");
    const Entry pickle{"a/data.pkl", good}, data{"a/data/0", identity_elements(2)};
    EXPECT_EQ(parse({pickle, data}), "no error");
    EXPECT_TRUE(contains(parse({data}), "has no NAME/data.pkl"));
    EXPECT_TRUE(contains(parse({{"data.pkl", good}, data}), "has no NAME/data.pkl"));
    EXPECT_TRUE(contains(parse({pickle}), "entry a/data/0 is missing"));
    EXPECT_TRUE(contains(parse({pickle, data, {"a/byteorder", "big"}}), "byte order is 'big'"));
    EXPECT_TRUE(contains(parse({{"a/data.pkl", good + std::string(1000, ' '), true}, data}), "is not stored as it is"));
    const std::string old = "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    const Bytes bytes(reinterpret_cast<const std::byte*>(old.data()),
                      reinterpret_cast<const std::byte*>(old.data()) + old.size());
    EXPECT_TRUE(contains(error_of([&] { parse_rotation_file(bytes, "x.pt"); }), "Files of PyTorch before 1.6"));
    EXPECT_TRUE(contains(error_of([&] { parse_rotation_file({}, "x.pt"); }), "not a PyTorch file"));
}

TEST(RotationFileByHand, DamageIsNoticed) {
    RotationFile file;
    file.layers[0].rotation = matrices({1});
    const Bytes bytes = serialise(file);
    EXPECT_EQ(parse_rotation_file(bytes, "x").layers.at(0).rotation, matrices({1}));
    for (size_t n = 0; n < bytes.size(); ++n) {
        EXPECT_THROW(parse_rotation_file(std::span(bytes).first(n), "x"), Error) << n;
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
        Bytes flipped = bytes;
        flipped[i] ^= std::byte(0x10);
        try {
            EXPECT_EQ(parse_rotation_file(flipped, "x").layers.at(0).rotation, matrices({1})) << i;
        } catch (const Error&) {
        }
    }
}

}  // namespace
}  // namespace crumb
