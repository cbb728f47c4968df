// Rebuilds tensors with the decoder for WebAssembly.
//
//     node decode.mjs DECODER.wasm PAIR BASE.safetensors TENSOR OUT     one tensor of a pair, into a file
//     node decode.mjs DECODER.wasm --vectors FOLDER                     the test vectors of a folder, as its manifest says
//
// PAIR is the path of the pair without extension.

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const [decoder, ...rest] = process.argv.slice(2);
const module = new WebAssembly.Module(readFileSync(decoder));

function rebuild(index, blob, name, base) {
    const { allocate, rebuild, memory } = new WebAssembly.Instance(module).exports;
    const args = [index, blob, new TextEncoder().encode(name), base].flatMap((bytes) => {
        const address = allocate(bytes.length);
        new Uint8Array(memory.buffer, address, bytes.length).set(bytes);
        return [address, bytes.length];
    });
    const result = BigInt.asUintN(64, rebuild(...args));
    const [address, size] = [Number((result >> 32n) & 0x7fffffffn), Number(result & 0xffffffffn)];
    const bytes = new Uint8Array(memory.buffer, address, size).slice();
    if (result >> 63n) throw new Error(new TextDecoder().decode(bytes));
    return bytes;
}

// The bytes of a tensor of a safetensors file; none if the file does not have it.
function tensorOf(path, name) {
    if (!path) return new Uint8Array();
    const file = readFileSync(path);
    const end = 8 + Number(file.readBigUInt64LE());
    const found = JSON.parse(file.subarray(8, end))[name];
    return found ? file.subarray(end + found.data_offsets[0], end + found.data_offsets[1]) : new Uint8Array();
}

// Compares with the manifest what this decoder can decode: whole tensors of pairs with a lone base file. It checks the digests of
// tensors itself, and says so with an error.
function vectors(folder) {
    const counts = { valid: 0, refused: 0, "not for this decoder": 0 };
    for (const vector of JSON.parse(readFileSync(join(folder, "manifest.json"))).vectors) {
        const at = (path) => path && join(folder, path);
        const [index, blob] = [vector.index, vector.blob].map((path) => readFileSync(at(path)));
        const names = vector.verdict === "valid" ? Object.keys(vector.tensors) : [vector.tensor ?? "w"];
        for (const name of names) {
            let error;
            try {
                const base = vector.base === null || vector.base.endsWith(".safetensors") ? tensorOf(at(vector.base), name) : undefined;
                if (base === undefined) throw new Error("this example: a folder");
                rebuild(index, blob, name, base);
            } catch (found) {
                error = found.message;
            }
            if (error?.startsWith("this example")) counts["not for this decoder"] += 1;
            else if (vector.verdict === "valid" && error !== undefined) throw new Error(`${vector.name}, ${name}: ${error}`);
            else if (vector.verdict === "valid") counts.valid += 1;
            else if (vector.when === "open_index" || vector.when === "open_blob") {
                if (!error?.includes(vector.rule === "limit" ? "limit" : vector.rule)) throw new Error(`${vector.name}: ${error}`);
                counts.refused += 1;
            }
        }
    }
    console.log(`${folder}: ${Object.entries(counts).map(([what, count]) => `${count} ${what}`).join(", ")}`);
    if (counts.valid === 0 || counts.refused === 0) throw new Error("nothing was compared");
}

if (rest[0] === "--vectors") {
    rest.slice(1).forEach(vectors);
} else {
    const [pair, base, name, out] = rest;
    const [index, blob] = ["index", "blob"].map((kind) => readFileSync(`${pair}.tpde-${kind}`));
    writeFileSync(out, rebuild(index, blob, name, tensorOf(base, name)));
}
