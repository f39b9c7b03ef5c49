//! Kozue's own directories: a Hugging Face directory whose large matrices are packed in the
//! order in which the kernels read them. `docs/checkpoint.md` documents the format.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use kozue_kernels::{Matrix, PackedMatrix, PackedSpec, Rotation, ZeroKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::affine::Slice;
use crate::config::ConfigFile;
use crate::description::Description;
use crate::error::Error;
use crate::fields::Fields;
use crate::hugging_face::describe;
use crate::layout::MTP;
use crate::resident::Resident;
use crate::safetensors::Dtype;
use crate::shards::Shards;
use crate::source::{CodeRows, InMemory, Note, Source, TensorInfo};

/// The setting of config.json that marks a directory as ours.
pub(crate) const CONFIG_KEY: &str = "kozue";
/// The version of the format that this code reads and writes.
pub(crate) const FORMAT_VERSION: usize = 1;
/// Names of the tensors that hold signs: this and the width.
pub(crate) const SIGNS: &str = "hadamard.";

/// More outputs or inputs than any matrix has.
const MAX_SIZE: usize = 1 << 24;

/// How one tensor is packed, kept as JSON in the file's metadata under the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PackedEntry {
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// Bits of a code.
    pub bits: u8,
    /// Inputs that share a scale.
    pub group: usize,
    /// What a code of zero stands for.
    pub zero: Zero,
    /// Name of the tensor of signs, if the inputs are rotated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signs: Option<String>,
}

/// The kernels' `ZeroKind`, as it is spelled in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Zero {
    Symmetric,
    Point,
    Min,
}

impl PackedEntry {
    pub fn new(spec: &PackedSpec, signs: Option<String>) -> PackedEntry {
        let zero = match spec.zero {
            ZeroKind::Symmetric => Zero::Symmetric,
            ZeroKind::Point => Zero::Point,
            ZeroKind::Min => Zero::Min,
        };
        PackedEntry {
            shape: [spec.n, spec.k],
            bits: spec.bits,
            group: spec.group,
            zero,
            signs,
        }
    }

    pub fn spec(&self) -> PackedSpec {
        let zero = match self.zero {
            Zero::Symmetric => ZeroKind::Symmetric,
            Zero::Point => ZeroKind::Point,
            Zero::Min => ZeroKind::Min,
        };
        let [n, k] = self.shape;
        PackedSpec {
            n,
            k,
            bits: self.bits,
            group: self.group,
            zero,
        }
    }
}

/// How a packed tensor is shown: `int4 group 64`.
pub(crate) fn format_name(spec: &PackedSpec) -> String {
    format!("int{} group {}", spec.bits, spec.group)
}

/// An opened directory.
pub(crate) struct Kozue {
    description: Description,
    shards: Shards,
    packed: Resident,
}

impl Kozue {
    /// `map` and `config` are what the directory's config.json, at `config_path`, says.
    pub fn open(
        dir: &Path,
        config_path: &Path,
        map: &Map<String, Value>,
        config: ConfigFile,
    ) -> Result<Kozue, Error> {
        let fields = Fields::new(config_path, map);
        if let Some(ours) = fields.object(CONFIG_KEY)? {
            let version = ours.required_size("version", u32::MAX as usize)?;
            if version != FORMAT_VERSION {
                let what = format!(
                    "{version} is not the version that this Kozue reads, {FORMAT_VERSION}; \
                     quantise the model again"
                );
                return Err(ours.error("version", what));
            }
            check_information(&ours)?;
        }
        let shards = Shards::open(dir, config.model.tied)?;
        let packed = packed_tensors(&shards)?;
        shards.check_floats(|name| packed.contains_key(name) || name.starts_with(SIGNS))?;
        Ok(Kozue {
            description: describe(dir, config)?,
            shards,
            packed: Resident::new(packed),
        })
    }
}

/// What config.json tells of the packing. Each tensor says it again, and that is what counts; but
/// a value that no conversion writes is a sign of damage.
fn check_information(ours: &Fields) -> Result<(), Error> {
    for key in ["size", "head"] {
        if let Some(size) = ours.text(key)?
            && !["M", "L"].contains(&size)
        {
            return Err(ours.error(key, format!("{size:?} is neither \"M\" nor \"L\"")));
        }
    }
    if let Some(group) = ours.size("group", u32::MAX as usize)?
        && ![32, 64, 128].contains(&group)
    {
        return Err(ours.error("group", format!("{group} is not 32, 64 or 128")));
    }
    ours.positive("bits_per_weight")?;
    ours.text("source")?;
    Ok(())
}

/// The packed matrix `name`, if it is one; an error if it has other dimensions.
pub(crate) fn find_packed<'p>(
    packed: &'p BTreeMap<String, PackedMatrix>,
    shards: &Shards,
    name: &str,
    n: usize,
    k: usize,
) -> Result<Option<&'p PackedMatrix>, Error> {
    let Some(matrix) = packed.get(name) else {
        return Ok(None);
    };
    if (matrix.n(), matrix.k()) != (n, k) {
        let path = shards.file(shards.get(name)?).path();
        return Err(Error::shape(path, name, &[matrix.n(), matrix.k()], &[n, k]));
    }
    Ok(Some(matrix))
}

/// Every tensor that the metadata call packed, with its signs.
pub(crate) fn packed_tensors(shards: &Shards) -> Result<BTreeMap<String, PackedMatrix>, Error> {
    let mut rotations: BTreeMap<String, Rotation> = BTreeMap::new();
    for info in shards.infos().filter(|info| info.name.starts_with(SIGNS)) {
        rotations.insert(info.name.clone(), read_signs(shards, &info.name)?);
    }
    let mut unused: BTreeSet<&str> = rotations.keys().map(String::as_str).collect();
    let mut packed = BTreeMap::new();
    for (path, metadata) in shards.metadata() {
        for (name, text) in metadata.iter().filter(|(name, _)| *name != "format") {
            let wrong = |what: String| Error::tensor(path, name, what);
            let entry: PackedEntry = serde_json::from_str(text)
                .map_err(|error| wrong(format!("its metadata are damaged: {error}")))?;
            if let Some(absurd) = entry.shape.iter().find(|&&size| size > MAX_SIZE) {
                return Err(wrong(format!(
                    "{absurd} is an absurd size (limit {MAX_SIZE})"
                )));
            }
            let placed = shards.get(name)?;
            if placed.entry.dtype != Dtype::U8 {
                let dtype = placed.entry.dtype.name();
                return Err(wrong(format!("is packed, but stored as {dtype}, not U8")));
            }
            let rotation = match &entry.signs {
                None => None,
                Some(signs) => {
                    unused.remove(signs.as_str());
                    let found = rotations.get(signs).cloned();
                    Some(found.ok_or_else(|| wrong(format!("its signs, {signs}, are missing")))?)
                }
            };
            let matrix = shards
                .shared(placed)
                .and_then(|bytes| PackedMatrix::new(entry.spec(), rotation, bytes))
                .map_err(|error| wrong(error.to_string()))?;
            packed.insert(name.clone(), matrix);
        }
    }
    match unused.first() {
        None => Ok(packed),
        Some(name) => {
            let path = shards.file(shards.get(name)?).path();
            Err(Error::tensor(
                path,
                name,
                "no tensor is rotated by these signs",
            ))
        }
    }
}

fn read_signs(shards: &Shards, name: &str) -> Result<Rotation, Error> {
    let placed = shards.get(name)?;
    let path = shards.file(placed).path();
    if placed.entry.dtype != Dtype::I8 {
        let dtype = placed.entry.dtype.name();
        return Err(Error::tensor(
            path,
            name,
            format!("is stored as {dtype}, but I8 is needed"),
        ));
    }
    let signs: Vec<i8> = shards
        .bytes(placed)
        .iter()
        .map(|&byte| byte as i8)
        .collect();
    Rotation::from_signs(&signs).map_err(|error| Error::tensor(path, name, error.to_string()))
}

impl Source for Kozue {
    fn description(&self) -> &Description {
        &self.description
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        let plain = self
            .shards
            .infos()
            .filter(|info| !info.name.starts_with(SIGNS));
        plain
            .map(|info| match self.packed.mapped().get(&info.name) {
                Some(matrix) => TensorInfo {
                    format: format_name(matrix.spec()),
                    shape: vec![matrix.n(), matrix.k()],
                    memory: InMemory::mapped(&format_name(matrix.spec()), info.bytes),
                    ..info
                },
                None => info,
            })
            .collect()
    }

    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        // A head that predicts further tokens stays where it is: most runs do without it.
        let packed = self.packed.running(&self.shards, name, Some(MTP));
        match find_packed(packed, &self.shards, name, n, k)? {
            Some(matrix) => Ok(Matrix::Packed(matrix.clone())),
            None => self.shards.matrix(name, n, k),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let Some(matrix) = self.packed.mapped().get(name) else {
            return self.shards.vector(name, len);
        };
        let (n, k) = (matrix.n(), matrix.k());
        if n.checked_mul(k) != Some(len) {
            let path = self.shards.file(self.shards.get(name)?).path();
            return Err(Error::shape(path, name, &[n, k], &[len]));
        }
        let mut values = vec![0.0; len];
        for (row, values) in values.chunks_exact_mut(k).enumerate() {
            matrix.row_into(row, values);
        }
        Ok(values)
    }

    fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        let Some(matrix) = self.packed.mapped().get(name) else {
            return self.shards.rows(name, k, first, out);
        };
        let end = out
            .len()
            .checked_div(k)
            .and_then(|count| first.checked_add(count));
        if matrix.k() != k || end.is_none_or(|end| end > matrix.n()) {
            let path = self.shards.file(self.shards.get(name)?).path();
            return Err(Error::shape(
                path,
                name,
                &[matrix.n(), matrix.k()],
                &[first, k],
            ));
        }
        for (row, values) in out.chunks_exact_mut(k).enumerate() {
            matrix.row_into(first + row, values);
        }
        Ok(())
    }

    fn codes(&self, name: &str) -> Option<Box<dyn CodeRows + '_>> {
        let matrix = self.packed.mapped().get(name)?;
        Some(Box::new(matrix))
    }

    fn release(&self, name: &str) {
        self.shards.release(name);
    }

    fn notes(&self) -> Vec<Note> {
        Vec::new()
    }
}

impl CodeRows for &PackedMatrix {
    fn spec(&self) -> PackedSpec {
        *PackedMatrix::spec(self)
    }

    fn rotation(&self) -> Option<Rotation> {
        PackedMatrix::rotation(self).cloned()
    }

    fn rows(&self, rows: Range<usize>) -> Slice {
        let spec = PackedMatrix::spec(self);
        let mut slice = Slice::default();
        for row in rows {
            slice
                .codes
                .extend((0..spec.k).map(|input| self.code(row, input)));
            for group in 0..spec.groups() {
                slice.scales.push(self.scale(row, group).to_f32());
                match spec.zero {
                    ZeroKind::Symmetric => {}
                    ZeroKind::Point => slice.zeros.push(f32::from(self.zero_point(row, group))),
                    ZeroKind::Min => slice.zeros.push(self.min(row, group).to_f32()),
                }
            }
        }
        slice
    }
}
