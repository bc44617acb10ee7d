#include "command_line.h"
#include "commands.h"
#include "gguf_rotation.h"
#include "model_identity.h"
#include "session.h"

#include <crumb/artefact.h>
#include <crumb/error.h>
#include <crumb/rotation_file.h>

#include <cstdio>
#include <filesystem>

namespace crumb::app {

int rotations(int argc, char** argv) {
    CLI::App app{"Artefacts from and to OSCAR's rotation files, GGUF tensors, and other files of a model", "crumb rotations"};
    app.require_subcommand(1);
    std::filesystem::path model, artefact, k, v, from, output;

    auto* import = app.add_subcommand("import", "official .pt files (V1, V2) -> artefact");
    import->add_option("-m,--model", model, "the GGUF model that they are for")->required();
    import->add_option("--k", k, "K rotations, .pt")->required();
    import->add_option("--v", v, "V rotations, .pt")->required();
    import->add_option("-o,--output", output, "artefact (default: beside the model)");

    auto* export_ = app.add_subcommand("export", "artefact -> official .pt files");
    export_->add_option("--artifact", artefact, "artefact")->required();
    export_->add_option("--k", k, "K rotations to write")->required();
    export_->add_option("--v", v, "V rotations to write")->required();

    auto* embed = app.add_subcommand("embed", "model and artefact -> one GGUF, for transport");
    embed->add_option("-m,--model", model, "GGUF model")->required();
    embed->add_option("--artifact", artefact, "artefact (default: beside the model)");
    embed->add_option("-o,--output", output, "GGUF to write")->required();

    auto* extract = app.add_subcommand("extract", "GGUF with rotations -> artefact");
    extract->add_option("-m,--model", model, "the GGUF model that they are for, without them")->required();
    extract->add_option("--from", from, "GGUF with the rotations")->required();
    extract->add_option("-o,--output", output, "artefact (default: beside the model)");

    auto* adopt = app.add_subcommand("adopt", "artefact of one quantisation of a model -> artefact of another");
    adopt->add_option("-m,--model", model, "the GGUF model that shall have it: the same model, not a fine-tune")->required();
    adopt->add_option("--artifact", artefact, "artefact of the other file")->required();
    adopt->add_option("-o,--output", output, "artefact (default: beside the model)");

    if (const auto status = parse(app, {argv, argv + argc})) { return *status; }
    if (!model.empty() && !std::filesystem::is_regular_file(model)) { fail("there is no model file {}", model.string()); }
    const auto identity = [&] {
        llama::quiet_log();
        return llama::identify(*llama::load_model(model, llama::Load::mapped), model);
    };
    const auto beside = [&](const std::filesystem::path& chosen) { return chosen.empty() ? llama::default_artefact(model) : chosen; };
    const auto not_an_input = [&](std::initializer_list<std::filesystem::path> inputs) {
        for (const auto& input : inputs) {
            std::error_code error;
            if (std::filesystem::equivalent(input, beside(output), error)) {
                fail("{} is read and would be overwritten: name another file with -o", input.string());
            }
        }
    };

    if (import->parsed()) {
        const Artefact result = import_rotation_files(k, v, identity());
        write_artefact(result, beside(output));
        std::printf("wrote %s: %zu layers, hash %s\n", beside(output).c_str(), result.layers.size(), result.hash().c_str());
    } else if (export_->parsed()) {
        const Artefact source = read_artefact(artefact);
        export_rotation_files(source, k, v);
        std::printf("wrote %s and %s\n", k.c_str(), v.c_str());
        if (source.has_planes()) { std::printf("the bases of 'planes' have no place in .pt files and stay in %s\n", artefact.c_str()); }
    } else if (embed->parsed()) {
        not_an_input({model, beside(artefact)});
        if (!std::filesystem::exists(beside(artefact))) {
            fail("there is no artefact {}: make one with\n    crumb calibrate -m {}\nor name another with --artifact", beside(artefact).string(), model.string());
        }
        llama::write_gguf_rotations(read_artefact(beside(artefact)), model, output);
        std::printf("wrote %s\n", output.c_str());
    } else {
        not_an_input({adopt->parsed() ? artefact : from});
        const Artefact result =
            adopt->parsed() ? read_artefact(artefact).adopted_by(identity()) : llama::read_gguf_rotations(from, identity());
        write_artefact(result, beside(output));
        std::printf("wrote %s: %zu layers, hash %s\n", beside(output).c_str(), result.layers.size(), result.hash().c_str());
    }
    return 0;
}

}  // namespace crumb::app
